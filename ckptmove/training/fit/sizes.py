"""``verify --fit 64x80GiB``: whether training from a checkpoint fits into the memory of N devices, without torch.

The figures are those of ``fully_shard`` (FSDP2). A parameter is split along its first dimension as ``torch.chunk``
splits, into pieces of ``ceil(n / ranks)`` rows: the first rank has the largest piece of every parameter, the last rank
the smallest. Gradients and optimizer state are split like their parameters (torch/distributed/fsdp/_fully_shard/
_fsdp_param.py ``FSDPParam._init_sharded_param``). Buffers are not split.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory, checkpoints_in
from ckptmove.checkpoint.inventory.partitions import is_partitioned
from ckptmove.checkpoint.opening import open_checkpoint
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.checkpoint.summary import counted_parameters
from ckptmove.conversion.shards import parse_size
from ckptmove.errors import UsageError
from ckptmove.formats.local_shards import CLASSES
from ckptmove.moves import Remap
from ckptmove.proof.checks import failed, passed
from ckptmove.proof.evidence import Fit, Verdict
from ckptmove.text import Argument, size

if TYPE_CHECKING:
    from ckptmove.model import Inventory, TensorRecord
    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.request import VerifyRequest

#: Name of the check.
FIT: Final = "fit"
#: Most ranks, and the limit of the search for a number of ranks that fits.
_MOST_RANKS: Final = 1 << 20
_FORM: Final = re.compile(r"\s*([0-9]{1,7})\s*[xX*×]\s*(\S.*)")


class Devices(NamedTuple):
    """The devices of a training.

    Attributes:
        ranks: number of devices, one for each rank.
        capacity: memory of each in bytes.
    """

    ranks: int
    capacity: int


class Parts(NamedTuple):
    """The tensors of a training that a checkpoint shows.

    Attributes:
        parameters: the parameters of the model.
        trained: those with a gradient, or tensors of the same shapes and dtypes.
        buffers: other tensors of the model.
        state: optimizer state that is split like its parameter; step counts stay on the CPU.
    """

    parameters: tuple[TensorRecord, ...]
    trained: tuple[TensorRecord, ...]
    buffers: tuple[TensorRecord, ...]
    state: tuple[TensorRecord, ...]

    @property
    def largest(self) -> TensorRecord:
        """The largest parameter."""
        return max(self.parameters, key=lambda one: one.nbytes)

    def on(self, rank: int, ranks: int) -> tuple[int, int, int, int]:
        """Bytes on one rank: parameters, gradients, optimizer state and buffers."""
        split = (
            sum(_bytes_on(one, rank, ranks) for one in part) for part in (self.parameters, self.trained, self.state)
        )
        parameters, gradients, state = split
        return parameters, gradients, state, sum(one.nbytes for one in self.buffers)


def parse_fit(text: str) -> Devices:
    """Parse ``64x80GiB``: 64 devices with 80 GiB each.

    Raises:
        UsageError: if the text has another form.
    """
    found = _FORM.fullmatch(text)
    with suppress(UsageError):
        if found is not None and 0 < int(found[1]) <= _MOST_RANKS:
            return Devices(int(found[1]), parse_size(found[2]))
    form = f"a number of devices, at most {_MOST_RANKS:,}, and the memory of each with its unit, as 64x80GiB"
    raise UsageError(f"{Argument('fit')} takes {form}, not {text[:40]!r}")


def verify_fit(request: VerifyRequest, devices: str) -> Verdict:
    """Make the check *fit*, and no other: only the metadata are read, also at a URL.

    Raises:
        UsageError: if the value has another form, or is combined with an option for the other checks; if the
            parameters are in partitions of ZeRO, or in a file of one rank; if there are several checkpoints.
        UnreadableInput: if the checkpoint cannot be read, is damaged, or is not a checkpoint.
        LimitExceeded: if it needs more than the limits allow.
    """
    refuse_others(request)
    wanted = parse_fit(devices)
    with open_checkpoint(request.path, request.limits, exclude=request.exclude) as checkpoint:
        why_not = _why_not_whole(checkpoint.inventory)
        if why_not:
            raise UsageError(f"{Argument('fit')} needs whole parameters, and {why_not}")
        _refuse_several(checkpoint.inventory)
        parts = find_parts(checkpoint.inventory)
    fit = _figures(parts, wanted)
    return verdict_of_fit(request, devices, _check(parts, fit), fit)


def verdict_of_fit(request: VerifyRequest, devices: str, check: CheckResult, fit: Fit | None) -> Verdict:
    """The verdict of the check *fit* alone, which proves no resume."""
    return Verdict(
        path=request.path,
        target=devices,
        mode=None,
        passed=check.status == "passed",
        proven=False,
        checks=(check,),
        findings=(),
        fit=fit,
    )


def find_parts(inventory: Inventory) -> Parts:
    """The tensors that a training from this checkpoint keeps on its devices."""
    parameters = tuple(counted_parameters(inventory))
    names = {one.name for one in parameters}
    model = (one for one in inventory.tensors if one.role == "model")
    held = inventory.in_one_format(model) if isinstance(inventory, DirectoryInventory) else [*model]
    storages = {one.storage for one in parameters}
    return Parts(
        parameters=parameters,
        trained=_trained(inventory, parameters),
        buffers=tuple(one for one in held if one.name not in names and one.storage not in storages),
        state=tuple(one for one in inventory.tensors if one.role == "optimizer" and one.shape),
    )


def _trained(inventory: Inventory, parameters: tuple[TensorRecord, ...]) -> tuple[TensorRecord, ...]:
    """Tensors with the shapes and dtypes of the gradients: the parameters of the optimizers.

    If it is not certain which these are, the largest moment of each has its shape and, except in optimizers with
    quantized state, its dtype. Without such moments every parameter counts.
    """
    optimizers = inventory.optimizers
    pairings = pair_all(inventory)
    matched = {record.name for pairing in pairings for _, record in pairing.matches if record is not None}
    found = tuple(one for one in parameters if one.name in matched)
    if found and all(pairing.is_certain for pairing in pairings):
        return found
    moments = [[one for _, one in entry.tensors if one.shape] for optimizer in optimizers for entry in optimizer.state]
    largest = tuple(max(entry, key=lambda one: one.nbytes) for entry in moments if entry)
    is_like = all(one.dtype in {parameter.dtype for parameter in parameters} for one in largest)
    is_flat = any(optimizer.algorithm == "LBFGS" for optimizer in optimizers)
    return largest if largest and is_like and not is_flat else parameters


def refuse_others(request: VerifyRequest) -> None:
    """Check that no option is for a check that ``--fit`` does not make.

    Raises:
        UsageError: if one is.
    """
    others = {
        "to": request.to is not None,
        "against": request.against is not None,
        "script": request.script is not None,
        "sample": request.sample is not None,
        "optimizer": request.optimizer is not None,
        "device_memory": request.device_memory is not None,
        "require_device": request.require_device,
    }
    given: list[str | Argument] = [Argument(name) for name, is_given in others.items() if is_given]
    if request.remap != Remap():
        given.append("the options of convert")
    if given:
        raise UsageError(f"{Argument('fit')} makes no other check: it cannot be combined with {given[0]}")


def has_whole_parameters(inventory: Inventory) -> bool:
    """Whether the shapes of the parameters are in the inventory."""
    return not (_why_not_whole(inventory) or checkpoints_in(inventory))


def _why_not_whole(inventory: Inventory) -> str:
    if any(map(is_partitioned, inventory.optimizers)):
        return "ZeRO saves partitions: gather them first, by convert -o"
    if any(one.subclass in CLASSES for one in inventory.tensors):
        return "this file has the shards of one rank: name the folder"
    return ""


def _refuse_several(inventory: Inventory) -> None:
    """Raise UsageError for a directory of several checkpoints, whose sizes would be added."""
    found = checkpoints_in(inventory)
    if found:
        several = f"{inventory.path} contains {len(found):,}: name one, such as {found[-1]}"
        raise UsageError(f"{Argument('fit')} counts one checkpoint, and {several}")


def _bytes_on(record: TensorRecord, rank: int, ranks: int) -> int:
    """Bytes of the piece of a tensor on one rank; a scalar is on all."""
    if not record.shape:
        return record.nbytes
    rows = record.shape[0]
    if not rows:
        return 0
    piece = -(-rows // ranks)
    return record.nbytes * min(piece, max(0, rows - rank * piece)) // rows


def _figures(parts: Parts, devices: Devices) -> Fit:
    parameters, gradients, state, buffers = parts.on(0, devices.ranks)
    total = parameters + gradients + state + buffers
    return Fit(
        ranks=devices.ranks,
        capacity=devices.capacity,
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        buffers=buffers,
        total=total,
        smallest=sum(parts.on(devices.ranks - 1, devices.ranks)),
        free=devices.capacity - total,
        largest_parameter=max((one.nbytes for one in parts.parameters), default=0),
    )


def _check(parts: Parts, fit: Fit) -> CheckResult:
    if not parts.parameters:
        return failed(FIT, "the checkpoint has no parameters of a model", **fit._asdict())
    has_state = "" if fit.optimizer else "; the checkpoint has no optimizer state"
    detail = f"{size(fit.total)} of {size(fit.capacity)} {where(fit, 'the fullest')} ({listed_sizes(fit)}){has_state}"
    gathered = _gathered(fit, fit.ranks)
    left = f"{size(fit.free)} left for activations" if fit.free >= 0 else ""
    if gathered and left:
        detail += f"; {left} and gathered parameters: the largest, {parts.largest.name}, takes {size(gathered)}"
    elif left:
        detail += f"; {left}"
    if fit.free >= gathered:
        return passed(FIT, detail, **fit._asdict())
    least = _least_ranks(parts, fit)
    enough = f"{least:,} ranks are enough" if least else f"no number of ranks is enough: {_why_never(parts, fit)}"
    return failed(FIT, f"{detail}; {enough}", **fit._asdict())


def _why_never(parts: Parts, fit: Fit) -> str:
    unsplit = sum(parts.on(0, _MOST_RANKS))
    if unsplit > fit.capacity:
        return f"{size(unsplit)} cannot be split"
    return f"{parts.largest.name} must be gathered whole: {size(fit.largest_parameter)}"


def where(fit: Fit, rank: str) -> str:
    """The rank of the figures, in words."""
    return f"on {rank} of {fit.ranks:,} ranks" if fit.ranks > 1 else "on 1 rank"


def listed_sizes(fit: Fit) -> str:
    """The sizes of the tensors of a training, in words."""
    named = (
        (fit.parameters, "parameters"),
        (fit.gradients, "gradients"),
        (fit.optimizer, "optimizer state"),
        (fit.buffers, "buffers"),
    )
    return ", ".join(f"{name} {size(nbytes)}" for nbytes, name in named if nbytes)


def _gathered(fit: Fit, ranks: int) -> int:
    """Bytes of the largest parameter while it is gathered; a single rank has it whole."""
    return fit.largest_parameter if ranks > 1 else 0


def _least_ranks(parts: Parts, fit: Fit) -> int:
    """The smallest number of ranks that fits; 0 if there is none."""

    def fits(ranks: int) -> bool:
        return sum(parts.on(0, ranks)) + _gathered(fit, ranks) <= fit.capacity

    if not fits(_MOST_RANKS):
        return 0
    low, high = fit.ranks, _MOST_RANKS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
