"""``inspect --fit 64x80GiB``: whether training from a checkpoint fits into the memory of N devices, by its sizes alone.

The figures are those of ``fully_shard`` (FSDP2). A parameter is split along its first dimension as ``torch.chunk``
splits, into pieces of ``ceil(n / ranks)`` rows: the first rank has the largest piece of every parameter. Gradients and
optimizer state are split like their parameters (torch/distributed/fsdp/_fully_shard/_fsdp_param.py
``FSDPParam._init_sharded_param``). Buffers are not split.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory, checkpoints_in
from ckptmove.checkpoint.inventory.partitions import is_partitioned
from ckptmove.checkpoint.summary import counted_parameters
from ckptmove.conversion.shards import parse_size
from ckptmove.errors import UsageError
from ckptmove.formats.local_shards import CLASSES
from ckptmove.formats.safetensors_shards import shard_name
from ckptmove.text import Argument, Phrase, amount, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Inventory, TensorRecord

#: Most devices, and the limit of the search for a number that is enough.
_MOST_RANKS: Final = 1 << 20
_FORM: Final = re.compile(r"\s*([0-9]{1,7})\s*[xX*×]\s*(\S.*)")
#: Path or URL of a shard of a model (transformers): what all shards share, their number, and the suffix.
_SHARD: Final = re.compile(r"(.*-)\d{5}-of-(\d{5})\.(bin|safetensors)(?:\?.*)?$")


class FitUnreadable(UsageError):
    """The value of ``--fit`` has another form."""

    def __init__(self, text: str) -> None:
        super().__init__(
            Phrase(Argument("fit"), f" takes the form 64x80GiB, in units of KB to TB or KiB to TiB, not {text[:40]!r}")
        )


class NotWhole(UsageError):
    """The checkpoint has not all parameters of a model, or those of several would be added.

    Attributes:
        remedy: what to do instead. ``{folder}`` is the folder of the file.
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
    #: whether ``total``, and on several devices the largest parameter gathered, is at most ``capacity``
    fits: bool
    parameters: int  # pieces of the parameters
    gradients: int  # pieces of the gradients, in the dtype of the parameters
    optimizer: int  # pieces of the optimizer state, without step counts, which are on the CPU
    buffers: int  # buffers, which every rank has whole
    total: int  # sum of these four
    free: int  # rest of the memory, for activations and gathered parameters; negative if `total` is more
    largest_name: str  # name of the largest parameter
    largest_parameter: int  # the largest parameter, whole
    least_ranks: int  # the smallest number of devices that is enough; 0 if no number is
    least_bytes: int  # the fewest bytes that each of any number of devices needs, with the largest parameter gathered

    @property
    def verdict(self) -> str:
        """``fits`` or ``does not fit``; without optimizer state, weights and gradients alone may fit."""
        if not self.fits:
            return "does not fit"
        return "fits" if self.optimizer else "weights and gradients fit"

    def __str__(self) -> str:
        is_split = self.ranks > 1
        named = (
            (self.parameters, "parameters"),
            (self.gradients, "gradients"),
            (self.optimizer, "optimizer state"),
            (self.buffers, "buffers"),
        )
        sizes = ", ".join(f"{name} {size(nbytes)}" for nbytes, name in named if nbytes)
        text = f"{self.verdict} on {Devices(self.ranks, self.capacity)}"
        if not self.optimizer:
            moments = f"AdamW adds twice the gradients ({size(2 * self.gradients)})"
            text += f"; the checkpoint has no optimizer state: {moments}"
        text += f"{': ' if self.optimizer else '; '}{size(self.total)}{' on the fullest' * is_split} ({sizes})"
        if self.free >= 0:
            text += f"; {size(self.free)} left for activations"
        if self.free >= 0 and is_split:
            largest = size(self.largest_parameter)
            text += f" and gathered parameters: the largest, {self.largest_name}, takes {largest}"
        if self.fits:
            return text
        enough = f"{amount(self.least_ranks, 'device')} {'is' if self.least_ranks == 1 else 'are'} enough"
        enough += "" if self.optimizer else " for weights and gradients"
        least = f"no number of devices is enough: each needs {size(self.least_bytes)}"
        return f"{text}; {enough if self.least_ranks else least}"


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
        return sum(self.on_first(ranks)) + (self.largest.nbytes if ranks > 1 else 0)

    @property
    def largest(self) -> TensorRecord:
        """The largest parameter."""
        return max(self.parameters, key=lambda one: one.nbytes)


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
    if not parts.parameters:
        why = "needs the parameters of a model, and this checkpoint has no model"
        raise NotWhole(inventory.path, why, "name the file of the model, or the directory with all files")
    figures = parts.on_first(devices.ranks)
    return Fit(
        *devices,
        parts.needed(devices.ranks) <= devices.capacity,
        *figures,
        total=sum(figures),
        free=devices.capacity - sum(figures),
        largest_name=parts.largest.name,
        largest_parameter=parts.largest.nbytes,
        least_ranks=_least_ranks(parts, devices.capacity),
        least_bytes=min(parts.needed(1), parts.needed(_MOST_RANKS)),
    )


def _require_whole(inventory: Inventory) -> None:
    path, several = inventory.path, checkpoints_in(inventory)
    name = "" if isinstance(inventory, DirectoryInventory) else path.replace("\\", "/").rpartition("/")[2]
    if any(map(is_partitioned, inventory.optimizers)):
        raise NotWhole(path, "needs whole parameters, and ZeRO saves partitions", "gather them first, by convert -o")
    if shard_name(name) is not None or any(one.subclass in CLASSES for one in inventory.tensors):
        raise NotWhole(path, "needs whole parameters, and this file has the shards of one rank", "name the folder")
    if several:
        raise NotWhole(path, f"counts one checkpoint, not {len(several):,}", f"name one, such as {several[-1]}")
    lost = [fact.record for fact in inventory.facts if fact.kind in {"missing-rank", "absent-shard"}]
    if lost:
        raise NotWhole(path, f"needs all files, and one may be missing: {lost[0]}", "copy that file too")
    _require_shards(inventory)


def _require_shards(inventory: Inventory) -> None:
    """Raise an error for shards of a model without the others."""
    path, files = inventory.path, [inventory.path]
    remedy = "name its directory: {folder}"
    if isinstance(inventory, DirectoryInventory):
        files, remedy = [file.path for file in inventory.files if not file.is_piece], "copy the others too"
    shards = Counter(match.groups() for match in map(_SHARD.match, files) if match is not None)
    for (_, number, _), count in shards.items():
        if count < int(number):
            raise NotWhole(path, f"needs all {int(number):,} shards of the model, not {count:,}", remedy)


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


def _least_ranks(parts: _Parts, capacity: int) -> int:
    """The smallest number of ranks on which the training fits; 0 if no number is enough.

    From 2 ranks on, each rank needs less with more ranks. A single rank gathers nothing.
    """
    if parts.needed(1) <= capacity:
        return 1
    several = range(2, _MOST_RANKS + 1)
    found = bisect_left(several, True, key=lambda ranks: parts.needed(ranks) <= capacity)
    return several[found] if found < len(several) else 0
