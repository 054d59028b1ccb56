"""Optimizers of DeepSpeed ZeRO, whose parameters are flat fp32 partitions next to their state.

ZeRO concatenates the parameters of a group, and each rank keeps one partition with the state for it
(``state_dict`` in deepspeed/runtime/zero/stage_1_and_2.py, stage3.py and deepspeed/runtime/bf16_optimizer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.pickles.tree import items_of
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.model import OptimizerRecord, StateEntry, TensorRecord
    from ckptmove.pickles.tree import Value

#: What every rank saves of its optimizer, and the state_dict of the optimizer in it: of stage 3, and of stages 1 and 2.
HOLDER: Final = "optimizer_state_dict"
_INNER: Final = (f".{HOLDER}", ".base_optimizer_state")
#: The lists of partitions: of stage 3, and of stages 1 and 2.
PARTITIONS: Final = ("fp32_flat_groups", "single_partition_of_fp32_groups")


def is_partitioned(optimizer: OptimizerRecord) -> bool:
    """Whether an optimizer is at the place of one of ZeRO."""
    holder = optimizer.where.rpartition(".")[0]
    return optimizer.where.endswith(_INNER) and f".{holder}".endswith(f".{HOLDER}")


def partitions(optimizer: OptimizerRecord, tensors: Mapping[str, TensorRecord]) -> list[TensorRecord]:
    """The partitions of an optimizer of ZeRO, in the order of its parameters; empty unless each parameter has one.

    Args:
        optimizer: the optimizer.
        tensors: tensors of its checkpoint, by name.
    """
    holder = optimizer.where.rpartition(".")[0]
    count = sum(len(group.params) for group in optimizer.groups)
    for key in PARTITIONS:
        found = [tensors.get(f"{holder}.{key}.{index}") for index in range(count)]
        if found and f"{holder}.{key}.{count}" not in tensors:
            dense = [record for record in found if record is not None and len(record.shape) == 1]
            if len(dense) == count:
                return dense
    return []


def of_partitions(
    optimizers: Sequence[OptimizerRecord], tensors: Sequence[TensorRecord], root: Value
) -> tuple[OptimizerRecord, ...]:
    """Optimizers with the state of ZeRO partitions cut to their length.

    Stages 1 and 2 save the last partition of a group without its padding, but the state with it.

    Args:
        optimizers: optimizers of a file.
        tensors: its tensors.
        root: its tree.
    """
    pairs = as_dict(root)
    state = None if pairs is None else as_dict(pairs.get(HOLDER))
    if state is None:
        return tuple(optimizers)
    paddings = items_of(state.get("group_paddings"))
    by_name = {record.name: record for record in tensors}
    found = []
    for optimizer in optimizers:
        own = partitions(optimizer, by_name) if is_partitioned(optimizer) else []
        if own:
            keys = (key for group in optimizer.groups for key in group.params)
            lengths = {
                key: (record.shape[0], padding)
                for key, record, padding in zip(keys, own, [*paddings, *[0] * len(own)], strict=False)
                if type(padding) is int
            }
            cut = tuple(_cut(entry, *lengths.get(entry.key, (0, 0))) for entry in optimizer.state)
            found.append(optimizer._replace(state=cut))
        else:
            found.append(optimizer)
    return tuple(found)


def _cut(entry: StateEntry, length: int, padding: int) -> StateEntry:
    """The state of a partition without its padding; DeepSpeed may count more than the partition has."""
    if not padding:
        return entry
    tensors = (
        (key, record._replace(shape=(length,), nbytes=length * ITEM_BYTES[record.dtype]))
        if len(record.shape) == 1 and length < record.shape[0] <= length + padding
        else (key, record)
        for key, record in entry.tensors
    )
    return entry._replace(tensors=tuple(tensors))
