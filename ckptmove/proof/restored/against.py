"""Compare a checkpoint with its original (``verify --against``), ignoring devices."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ckptmove.comparison.compare import TensorComparison
from ckptmove.comparison.differences import Criteria
from ckptmove.proof.checks import Offenders
from ckptmove.proof.restored.survey import NOT_COMPARED
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.proof.tensors.stored import without_padding
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.comparison.counterparts import Counterparts
    from ckptmove.comparison.differences import Change
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, OptimizerRecord, ParamGroup, TensorRecord
    from ckptmove.proof.tensors.pieces import TensorSource, Window


class OriginalTensors:
    """Tensors of the original, by the names and with the dtypes of the checkpoint converted from it."""

    def __init__(self, found: Counterparts, original: Inventory, source: TensorSource) -> None:
        self._optimizers = original.optimizers
        self.is_cast = bool(casts(found))  # whether any tensor was cast to another dtype
        self._records = {_key(mine): theirs for mine, theirs in _dense_pairs(found)}
        both = ((mine.record, theirs.record) for mine, theirs in found.pairs)
        self._records |= {_key(mine): theirs for mine, theirs in both if mine.kind == theirs.kind == "wrapper-subclass"}
        self._source = source

    def tensor(self, record: TensorRecord, window: Window | None = None) -> torch.Tensor:
        """The original of a record, or a run of its elements, with the record's dtype."""
        theirs = self._records.get(_key(record))
        if theirs is None:
            raise LookupError(f"the original has no {record.name}")
        values = self._source.tensor(theirs, window)
        values = without_padding(values, record) if window is None else values
        return values if record.kind == "wrapper-subclass" else values.to(dtype_of(record.dtype))

    def groups(self, optimizer: OptimizerRecord) -> tuple[ParamGroup, ...]:
        """The original's groups of an optimizer of the checkpoint; empty if they cannot be matched."""
        alike = [one for one in self._optimizers if one.where == optimizer.where] or self._optimizers
        groups = alike[0].groups if len(alike) == 1 else ()
        return groups if len(groups) == len(optimizer.groups) else ()


def differences(
    checkpoint: OpenCheckpoint,
    original: OpenCheckpoint,
    found: Counterparts,
    limits: Limits,
    names: frozenset[str] | None = None,
    *,
    compact: bool = False,
) -> tuple[Offenders, tuple[str, ...]]:
    """Differences between a checkpoint and its original, ignoring devices and what ``convert`` changes with them.

    Args:
        original: this and the checkpoint as :func:`ckptmove.checkpoint.open_checkpoint.side_by_side` returns them.
        names: names of the tensors whose values are compared; None for all.
        compact: whether storages of the checkpoint that are larger than expected are differences.

    Returns:
        The differences, and remarks for the report: tensors not matched by their name, or not compared.
    """
    criteria = Criteria(devices=False, values_of=names)
    result = TensorComparison(checkpoint, original, criteria, limits, _without_figures).result(found)
    lost = Offenders()
    for name in result.added:
        lost.add(f"{name} is missing")
    for name in result.removed:
        lost.add(f"{name} is not in the original")
    for change in result.changed:
        lost.add(_describe(change))
    for unknown in result.uncompared:
        lost.add(f"{unknown.name}: {unknown.reason}")
    for name, nbytes, most in _oversized(found) if compact else ():
        lost.add(f"{name}: a storage of {nbytes:,} bytes in place of {most:,}")
    return lost, result.notes


def _oversized(found: Counterparts) -> Iterator[tuple[str, int, int]]:
    """Tensors in a storage larger than that of their counterpart: their names, and both sizes in bytes.

    A tensor may have a storage of its own on one side only, and an expanded one may be written with all its elements.
    """
    parts = {id(stored.part): stored.part for pair in found.pairs for stored in pair}
    sizes = {at: {one.key: one.nbytes for one in part.inventory.storages} for at, part in parts.items()}
    for one, two in found.pairs:
        for mine, theirs in zip(one.record.dense(), two.record.dense(), strict=False):
            nbytes = sizes[id(one.part)].get(mine.storage or "", 0)
            most = max(sizes[id(two.part)].get(theirs.storage or "", 0), mine.nbytes)
            if nbytes > most:
                yield mine.name, nbytes, most


def _describe(change: Change) -> str:
    if change.what == "value" and change.source == change.target:  # otherwise the numbers of values differ
        return f"{change.name}: other bits"
    if change.what != "object":
        return f"{change.name}: {change.what} {change.source} in place of {change.target}"
    if change.source == "absent":
        return f"{change.name} is missing"
    if change.target == "absent":
        return f"{change.name} is not in the original"
    return f"{change.name} is {change.source} in place of {change.target}"


def _without_figures(*_: object) -> None:
    """Measure nothing: it is enough to know that values differ."""


def casts(found: Counterparts) -> str:
    """Casts between the original and the checkpoint, as text for the report; empty without casts."""
    pairs = Counter((theirs.dtype, mine.dtype) for mine, theirs in _dense_pairs(found) if theirs.dtype != mine.dtype)
    return ", ".join(f"{amount(count, 'tensor')} cast from {one} to {other}" for (one, other), count in pairs.items())


def _dense_pairs(found: Counterparts) -> Iterator[tuple[TensorRecord, TensorRecord]]:
    """Matched dense tensors that have bytes."""
    for mine, theirs in found.pairs:
        if not NOT_COMPARED & {mine.record.kind, theirs.record.kind}:
            yield from zip(mine.record.dense(), theirs.record.dense(), strict=False)


def _key(record: TensorRecord) -> tuple[str, str | None, int]:
    return record.name, record.storage, record.storage_offset
