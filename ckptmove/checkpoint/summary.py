"""Summarize a checkpoint: parameters, dtypes, epoch, step, learning rates and optimizers."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.file_names import STAGE_3_FILE
from ckptmove.checkpoint.state_dicts import parameters_by_state_dict
from ckptmove.checkpoint.trainers import COUNTER_KEYS, Counters, agreed, read_counters
from ckptmove.model import OPAQUE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import Inventory, OptimizerRecord, TensorRecord

#: Most tensors that are read in search of a step counter.
_MOST_READ: Final = 8
#: A larger number, or a NaN, is no learning rate.
_HIGHEST_RATE: Final = 1e6
#: A larger number is no step count.
_MOST_STEPS: Final = 1 << 63


class CheckpointSummary(NamedTuple):
    """What people look for first in a checkpoint."""

    #: number of elements of the model's parameters, as of :func:`counted_parameters`, and in partitions of ZeRO.
    parameters: int = 0
    dtypes: tuple[tuple[str, int], ...] = ()  # dtypes of the parameters with numbers of elements, most first
    epoch: float | None = None  # epoch of the training, or None if unknown
    step: int | None = None  # step of the training by its trainer, or else by its optimizer; None if unknown
    learning_rates: tuple[float, ...] = ()  # distinct learning rates of the parameter groups, in order
    #: distinct classes of the optimizers, in order; ``Adam or AdamW`` if the file does not distinguish them.
    optimizers: tuple[str, ...] = ()


def summarize(checkpoint: OpenCheckpoint) -> CheckpointSummary:
    """Summarize a checkpoint while it is open.

    If no trainer has counted the steps, at most two step counts of each optimizer are read. A learning rate that is a
    tensor is read too. A number that cannot be read is unknown.
    """
    inventory = checkpoint.inventory
    counters = Counters(inventory.epoch, inventory.step)
    if counters.step is None:
        counters = agreed((counters, *map(_tensor_counters, checkpoint.parts)))
    dtypes: dict[str, int] = {}
    records = counted_parameters(inventory)
    if isinstance(inventory, DirectoryInventory) and all(STAGE_3_FILE.match(one.name) for one in records):
        dtypes.update(inventory.partitioned)  # no other file has the whole parameters
    for record in records:
        dtypes[record.dtype] = dtypes.get(record.dtype, 0) + prod(record.shape)
    rates: dict[float, None] = {}
    steps: set[float] = set()
    for part in checkpoint.parts:
        rates.update(dict.fromkeys(_rates(part)))
        if counters.step is None:
            steps.update(max(_steps(part, optimizer), default=0) for optimizer in part.inventory.optimizers)
    steps.discard(0)
    return CheckpointSummary(
        parameters=sum(dtypes.values()),
        dtypes=tuple(sorted(dtypes.items(), key=lambda pair: -pair[1])),
        epoch=counters.epoch,
        step=int(steps.pop()) if len(steps) == 1 else counters.step,
        learning_rates=tuple(rates),
        optimizers=tuple(dict.fromkeys(" or ".join(one.candidates) for one in inventory.optimizers if one.candidates)),
    )


def counted_parameters(inventory: Inventory) -> Sequence[TensorRecord]:
    """Return the tensors of ``model.parameters()``, as far as a checkpoint shows them.

    These are the floating, complex and quantized tensors of the model, or of its EMA copy if there is no model; tied
    tensors count once, and copies that are no longer trained (``best_model``) not at all.

    A state_dict does not mark buffers. Those of torch's own modules are left out by their names; any other floating
    buffer counts. Weights that are packed into integers (bitsandbytes, GPTQ) do not count. A tensor that every rank of
    tensor parallelism saves counts once for each rank.

    In a directory, a model in two formats counts once, and so does the model of equal checkpoints. What only ZeRO's
    partitions hold is not counted.
    """
    parts = parameters_by_state_dict(inventory)
    # A state_dict of a later rank of ZeRO stage 3 has the buffers of the first one.
    repeated = {where for where in parts if (match := STAGE_3_FILE.match(where)) is not None and match[1] != "0"}
    found = [tensor for where, inside in parts.items() if where not in repeated for tensor in inside]
    if not isinstance(inventory, DirectoryInventory):
        return found
    found = inventory.in_one_format(found)
    groups = [*inventory.by_checkpoint(found)]
    return groups[0] if len({sum(prod(one.shape) for one in group) for group in groups}) == 1 else found


def _tensor_counters(part: OpenPart) -> Counters:
    """Read step counters that are tensors."""
    named = [(part.own_name(tensor.name), tensor) for tensor in part.inventory.tensors if tensor.role != "optimizer"]
    found = [(name, tensor) for name, tensor in named if name.rpartition(".")[2] in COUNTER_KEYS]
    numbers = [(name, part.number(tensor)) for name, tensor in found[:_MOST_READ]]
    return read_counters((name, number) for name, number in numbers if number is not None)


def _rates(part: OpenPart) -> Iterator[float]:
    """Iterate over the learning rates of all groups; a rate can be a tensor."""
    tensors: dict[str, TensorRecord] = {}
    for group in (group for optimizer in part.inventory.optimizers for group in optimizer.groups):
        rate = dict(group.options).get("lr")
        if rate is OPAQUE:
            tensors = tensors or {tensor.name: tensor for tensor in part.inventory.tensors}
            record = tensors.get(f"{group.where}.lr")
            number = None if record is None else part.number(record)
            rate = number if number is None else float(f"{number:.7g}")  # 0.001, and not 0.0010000000474974513
        if isinstance(rate, int | float) and rate is not True and 0 <= rate < _HIGHEST_RATE:
            yield float(rate)


def _steps(part: OpenPart, optimizer: OptimizerRecord) -> Iterator[float]:
    """Iterate over the step counts of the first and the last parameter, and of groups that count themselves (apex)."""
    for entry in {entry.key: entry for entry in (*optimizer.state[:1], *optimizer.state[-1:])}.values():
        record = entry.tensor("step")
        yield _count(dict(entry.scalars).get("step") if record is None else part.number(record))
    for group in optimizer.groups:
        yield _count(dict(group.options).get("step"))


def _count(value: object) -> float:
    return value if isinstance(value, int | float) and 0 <= value < _MOST_STEPS else 0
