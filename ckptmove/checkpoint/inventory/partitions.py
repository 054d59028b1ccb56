"""Optimizers of DeepSpeed ZeRO, whose parameters are flat fp32 partitions next to their state.

ZeRO concatenates the parameters of a group, and each rank keeps one partition with the state for it
(``state_dict`` in deepspeed/runtime/zero/stage_1_and_2.py, stage3.py and deepspeed/runtime/bf16_optimizer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.pickles.tree import items_of
from ckptmove.text import amount
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.model import Inventory, OptimizerRecord, StateEntry, TensorRecord
    from ckptmove.pickles.tree import Dict, Value

#: What every rank saves of its optimizer, and the state_dict of the optimizer in it: of stage 3, and of stages 1 and 2.
HOLDER: Final = "optimizer_state_dict"
_INNER: Final = (f".{HOLDER}", ".base_optimizer_state")
#: The number of ranks with a partition: of stages 1 and 2 a list with one for each group, as experts have fewer.
_COUNT: Final = "partition_count"
#: A larger number counts no ranks.
_MOST_RANKS: Final = 1 << 20
#: The lists of partitions: of stage 3, and of stages 1 and 2.
PARTITIONS: Final = ("fp32_flat_groups", "single_partition_of_fp32_groups")


def is_partitioned(optimizer: OptimizerRecord) -> bool:
    """Whether an optimizer is at the place of one of ZeRO."""
    holder = optimizer.where.rpartition(".")[0]
    return optimizer.where.endswith(_INNER) and f".{holder}".endswith(f".{HOLDER}")


def partitions(optimizer: OptimizerRecord, tensors: Mapping[str, TensorRecord]) -> list[TensorRecord]:
    """The partitions of an optimizer of ZeRO, in the order of its parameters; empty unless each parameter has one."""
    holder = optimizer.where.rpartition(".")[0]
    count = sum(len(group.params) for group in optimizer.groups)
    for key in PARTITIONS:
        found = [tensors.get(f"{holder}.{key}.{index}") for index in range(count)]
        if found and f"{holder}.{key}.{count}" not in tensors:
            dense = [record for record in found if record is not None and len(record.shape) == 1]
            if len(dense) == count:
                return dense
    return []


def rank_count(state: Dict) -> int:
    """The number of ranks that share the state of a ZeRO optimizer; 0 if it does not state it."""
    counted = state.get(_COUNT)
    return max((one for one in (counted, *items_of(counted)) if type(one) is int), default=0)


def one_of_ranks(inventory: Inventory, optimizer: OptimizerRecord) -> str:
    """Why a ZeRO optimizer cannot be restored: the checkpoint has the states of fewer ranks than share it; else empty.

    DeepSpeed's own ``load_state_dict`` takes a list with the states of all ranks. They have no ``param_groups`` at the
    top, which that of torch reads first.
    """
    there = sum(one.ranks == optimizer.ranks for one in inventory.optimizers)
    if there >= optimizer.ranks:
        return ""
    return (
        f"it is DeepSpeed's ZeRO state of {there:,} of {amount(optimizer.ranks, 'rank')} ({_COUNT}), which "
        "load_state_dict of torch refuses (KeyError: 'param_groups')"
    )


def of_partitions(
    optimizers: Sequence[OptimizerRecord], tensors: Sequence[TensorRecord], root: Value
) -> tuple[OptimizerRecord, ...]:
    """Optimizers with the state of ZeRO partitions cut to their length, and the number of their ranks.

    Stages 1 and 2 save the last partition of a group without its padding, but the state with it.
    """
    optimizers = tuple(one._replace(ranks=_ranks_of(one, root)) for one in optimizers)
    pairs = as_dict(root)
    state = None if pairs is None else as_dict(pairs.get(HOLDER))
    if state is None:
        return optimizers
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


def _ranks_of(optimizer: OptimizerRecord, root: Value) -> int:
    """The number of ranks that the dict with an optimizer states; 1 if it states none."""
    if not f".{optimizer.where}".endswith(_INNER):
        return 1
    holder: Dict | None = as_dict(root)
    for key in optimizer.where.split(".")[:-1]:
        holder = None if holder is None else as_dict(holder.get(key))
    return min(max(1, 0 if holder is None else rank_count(holder)), _MOST_RANKS)


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
