"""``inspect --fit 64x80GiB``: whether training from a checkpoint fits into the memory of N devices, by its sizes alone.

The figures are those of ``fully_shard`` (FSDP2). A parameter is split along its first dimension as ``torch.chunk``
splits, into pieces of ``ceil(n / ranks)`` rows: the first rank has the largest piece of every parameter. Gradients and
optimizer state are split like their parameters (torch/distributed/fsdp/_fully_shard/_fsdp_param.py
``FSDPParam._init_sharded_param``). Buffers are not split.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory, checkpoints_in
from ckptmove.checkpoint.inventory.partitions import is_partitioned
from ckptmove.checkpoint.summary import counted_parameters
from ckptmove.conversion.shards import parse_size
from ckptmove.errors import UsageError
from ckptmove.formats.local_shards import CLASSES
from ckptmove.text import Argument, Phrase, amount, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Inventory, TensorRecord

#: Most devices, and the limit of the search for a number that is enough.
_MOST_RANKS: Final = 1 << 20
_FORM: Final = re.compile(r"\s*([0-9]{1,7})\s*[xX*×]\s*(\S.*)")


class FitUnreadable(UsageError):
    """The value of ``--fit`` has another form."""

    def __init__(self, text: str) -> None:
        super().__init__(Phrase(Argument("fit"), f" takes the form 64x80GiB, not {text[:40]!r}"))


class NotWhole(UsageError):
    """The parameters are not whole in the checkpoint, or those of several would be added.

    Attributes:
        remedy: what to do instead.
    """

    is_of_checkpoint = True

    def __init__(self, path: str, why: str, remedy: str) -> None:
        super().__init__(Phrase(Argument("fit"), f" {why}"), path=path)
        self.remedy = remedy


class Devices(NamedTuple):
    """The devices of a training."""

    ranks: int  # number of devices, one for each rank
    capacity: int  # memory of each in bytes

    def __str__(self) -> str:
        """``64 devices of 80.0 GiB``."""
        return f"{amount(self.ranks, 'device')} of {size(self.capacity)}"


class Fit(NamedTuple):
    """The memory of a training on the first rank, which needs most, in bytes."""

    ranks: int  # number of devices
    capacity: int  # memory of each
    #: whether ``total``, and on several devices the largest parameter gathered, is at most ``capacity``. False without
    #: parameters.
    fits: bool
    parameters: int  # pieces of the parameters
    gradients: int  # pieces of the gradients, in the dtype of the parameters
    optimizer: int  # pieces of the optimizer state, without step counts, which are on the CPU
    buffers: int  # buffers, which every rank has whole
    total: int  # sum of these four
    free: int  # rest of the memory, for activations and gathered parameters; negative if `total` is more
    largest_name: str  # name of the largest parameter; empty without parameters
    largest_parameter: int  # the largest parameter, whole
    least_ranks: int  # the smallest number of devices that is enough, 0 if there is none
    least_bytes: int  # bytes on each of the most devices, with the largest parameter gathered

    def __str__(self) -> str:
        verdict = f"{'fits' if self.fits else 'does not fit'} on {Devices(self.ranks, self.capacity)}: "
        if not self.largest_name:
            return f"{verdict}the checkpoint has no parameters of a model"
        is_split = self.ranks > 1
        named = (
            (self.parameters, "parameters"),
            (self.gradients, "gradients"),
            (self.optimizer, "optimizer state"),
            (self.buffers, "buffers"),
        )
        sizes = ", ".join(f"{name} {size(nbytes)}" for nbytes, name in named if nbytes)
        text = f"{verdict}{size(self.total)}{' on the fullest' * is_split} ({sizes})"
        text += "" if self.optimizer else "; the checkpoint has no optimizer state"
        if self.free >= 0:
            text += f"; {size(self.free)} left for activations"
        if self.free >= 0 and is_split:
            largest = size(self.largest_parameter)
            text += f" and gathered parameters: the largest, {self.largest_name}, takes {largest}"
        if self.fits:
            return text
        least = f"no number of devices is enough: each needs {size(self.least_bytes)}"
        return f"{text}; {f'{self.least_ranks:,} devices are enough' if self.least_ranks else least}"


class _Parts(NamedTuple):
    """The tensors of a training that a checkpoint shows."""

    parameters: Sequence[TensorRecord]  # the parameters of the model
    trained: Sequence[TensorRecord]  # those with a gradient, or tensors of the same shapes and dtypes
    state: Sequence[TensorRecord]  # optimizer state that is split like its parameter; step counts stay on the CPU
    buffers: Sequence[TensorRecord]  # other tensors of the model

    def on_first(self, ranks: int) -> tuple[int, int, int, int]:
        """Bytes on the first rank: parameters, gradients, optimizer state and buffers."""
        split = (sum(_bytes_on_first(one, ranks) for one in part) for part in self[:3])
        parameters, gradients, state = split
        return parameters, gradients, state, sum(one.nbytes for one in self.buffers)

    def needed(self, ranks: int) -> int:
        """Bytes on the first rank, and those of the largest parameter while it is gathered."""
        gathered = max((one.nbytes for one in self.parameters), default=0) if ranks > 1 else 0
        return sum(self.on_first(ranks)) + gathered


def parse_fit(text: str) -> Devices:
    """Parse ``64x80GiB``: 64 devices with 80 GiB each."""
    found = _FORM.fullmatch(text)
    with suppress(UsageError):
        if found is not None and 0 < int(found[1]) <= _MOST_RANKS:
            return Devices(int(found[1]), parse_size(found[2]))
    raise FitUnreadable(text)


def find_fit(inventory: Inventory, pairings: Sequence[Pairing], devices: Devices) -> Fit:
    """Compute the memory of a training from a checkpoint."""
    _require_whole(inventory)
    parts = _parts(inventory, pairings)
    largest = max(parts.parameters, key=lambda one: one.nbytes, default=None)
    figures = parts.on_first(devices.ranks)
    fits = largest is not None and parts.needed(devices.ranks) <= devices.capacity
    return Fit(
        *devices,
        fits,
        *figures,
        total=sum(figures),
        free=devices.capacity - sum(figures),
        largest_name="" if largest is None else largest.name,
        largest_parameter=0 if largest is None else largest.nbytes,
        least_ranks=devices.ranks if fits else _least_ranks(parts, devices),
        least_bytes=parts.needed(_MOST_RANKS),
    )


def _require_whole(inventory: Inventory) -> None:
    path, several = inventory.path, checkpoints_in(inventory)
    if any(map(is_partitioned, inventory.optimizers)):
        raise NotWhole(path, "needs whole parameters, and ZeRO saves partitions", "gather them first, by convert -o")
    if any(one.subclass in CLASSES for one in inventory.tensors):
        raise NotWhole(path, "needs whole parameters, and this file has the shards of one rank", "name the folder")
    if several:
        raise NotWhole(path, f"counts one checkpoint, not {len(several):,}", f"name one, such as {several[-1]}")


def _parts(inventory: Inventory, pairings: Sequence[Pairing]) -> _Parts:
    parameters = tuple(counted_parameters(inventory))
    names, storages = {one.name for one in parameters}, {one.storage for one in parameters}
    model = [one for one in inventory.tensors if one.role == "model"]
    held = inventory.in_one_format(model) if isinstance(inventory, DirectoryInventory) else model
    return _Parts(
        parameters=parameters,
        trained=_trained(inventory, pairings, parameters),
        state=[one for one in inventory.tensors if one.role == "optimizer" and one.shape],
        buffers=[one for one in held if one.name not in names and one.storage not in storages],
    )


def _trained(
    inventory: Inventory, pairings: Sequence[Pairing], parameters: tuple[TensorRecord, ...]
) -> Sequence[TensorRecord]:
    """Tensors with the shapes and dtypes of the gradients: the parameters of the optimizers.

    If it is not certain which these are, the largest moment of each has its shape and, except in optimizers with
    quantized state, its dtype. Without such moments every parameter counts.
    """
    optimizers = inventory.optimizers
    matched = {record.name for pairing in pairings for _, record in pairing.matches if record is not None}
    found = tuple(one for one in parameters if one.name in matched)
    if found and all(pairing.is_certain for pairing in pairings):
        return found
    moments = [[one for _, one in entry.tensors if one.shape] for optimizer in optimizers for entry in optimizer.state]
    largest = tuple(max(entry, key=lambda one: one.nbytes) for entry in moments if entry)
    is_like = all(one.dtype in {parameter.dtype for parameter in parameters} for one in largest)
    is_flat = any(optimizer.algorithm == "LBFGS" for optimizer in optimizers)
    return largest if largest and is_like and not is_flat else parameters


def _bytes_on_first(record: TensorRecord, ranks: int) -> int:
    """Bytes of the piece of a tensor on the first rank; a scalar is on all."""
    if not record.shape or not record.shape[0]:
        return record.nbytes
    rows = record.shape[0]
    return record.nbytes * -(-rows // ranks) // rows


def _least_ranks(parts: _Parts, devices: Devices) -> int:
    """The smallest number of ranks that fits; 0 if there is none."""
    if not parts.parameters or parts.needed(_MOST_RANKS) > devices.capacity:
        return 0
    low, high = devices.ranks, _MOST_RANKS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if parts.needed(middle) <= devices.capacity else (middle, high)
    return high
