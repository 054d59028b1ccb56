"""The second half of the restore check: the checkpoint equals its original, devices aside."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.comparison.compare import compare_stored
from ckptmove.comparison.differences import Criteria
from ckptmove.text import amount
from ckptmove.verification.checks import Offenders
from ckptmove.verification.restore import NOT_COMPARED
from ckptmove.verification.state import dtype_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.comparison.counterparts import Counterparts
    from ckptmove.comparison.differences import Change
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, OptimizerRecord, ParamGroup, TensorRecord
    from ckptmove.verification.pieces import TensorSource
    from ckptmove.verification.sampling import Sample


class OriginalTensors:
    """The original's tensors under the names and with the dtypes of the checkpoint that came from it.

    Attributes:
        is_cast: whether any of them has another dtype there.
    """

    def __init__(self, found: Counterparts, original: Inventory, source: TensorSource) -> None:
        """Look up the original's tensors.

        Args:
            found: tensors of the checkpoint, whose records will be asked for, with those of the original.
            original: the original.
            source: of its tensors, wrapper subclasses too.
        """
        self._optimizers = original.optimizers
        self.is_cast = bool(casts(found))
        self._records = {_key(mine): theirs for mine, theirs in _dense_pairs(found)}
        both = ((mine.record, theirs.record) for mine, theirs in found.pairs)
        self._records |= {_key(mine): theirs for mine, theirs in both if mine.kind == theirs.kind == "wrapper-subclass"}
        self._source = source

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """The original of a record, cast as it was.

        Raises:
            LookupError: the original has no such tensor.
            NoWrapper: the original of a wrapper subclass is not loaded.
        """
        theirs = self._records.get(_key(record))
        if theirs is None:
            raise LookupError(f"the original has no {record.name}")
        values = self._source.tensor(theirs)
        return values if record.kind == "wrapper-subclass" else values.to(dtype_of(record.dtype))

    def groups(self, optimizer: OptimizerRecord) -> tuple[ParamGroup, ...]:
        """The groups of an optimizer in the original; none where it has no such one, or other groups.

        Args:
            optimizer: one of the checkpoint's.
        """
        alike = [one for one in self._optimizers if one.where == optimizer.where] or self._optimizers
        groups = alike[0].groups if len(alike) == 1 else ()
        return groups if len(groups) == len(optimizer.groups) else ()


class Comparison(NamedTuple):
    """How a checkpoint compares with its original.

    Attributes:
        lost: where it differs from the original.
        notes: what was compared otherwise than name by name, or not at all, for people.
    """

    lost: Offenders
    notes: tuple[str, ...] = ()


def differences(
    checkpoint: OpenCheckpoint,
    original: OpenCheckpoint,
    found: Counterparts,
    limits: Limits,
    sample: Sample | None = None,
) -> Comparison:
    """Where a checkpoint differs from its original, devices and what ``convert`` changes with them aside.

    Args:
        checkpoint: the one that is verified.
        original: its original; both from :func:`ckptmove.checkpoint.open_checkpoint.side_by_side`.
        found: which of their tensors and files belong together.
        limits: what each of them may ask for.
        sample: the tensors whose values are compared; None for all.

    Raises:
        UnreadableInput, LimitExceeded: as :func:`ckptmove.comparison.compare.compare`.
    """
    criteria = Criteria(devices=False, values_of=None if sample is None else sample.names)
    result = compare_stored(checkpoint, original, found, criteria, limits, _without_figures)
    lost = Offenders()
    for name in result.added:
        lost.add(f"{name} is missing")
    for name in result.removed:
        lost.add(f"{name} is not in the original")
    for change in result.changed:
        lost.add(_told(change))
    for unknown in result.uncompared:
        lost.add(f"{unknown.name}: {unknown.reason}")
    return Comparison(lost, result.notes)


def _told(change: Change) -> str:
    if change.what == "value" and change.source == change.target:  # else the numbers of values differ
        return f"{change.name}: other bits"
    if change.what != "object":
        return f"{change.name}: {change.what} {change.source} in place of {change.target}"
    if change.source == "absent":
        return f"{change.name} is missing"
    if change.target == "absent":
        return f"{change.name} is not in the original"
    return f"{change.name} is {change.source} in place of {change.target}"


def _without_figures(*_: object) -> None:
    """Measure nothing: that values differ is enough."""


def casts(found: Counterparts) -> str:
    """What a comparison with the original has made up for, for people: nothing, or how many tensors were cast."""
    pairs = Counter((theirs.dtype, mine.dtype) for mine, theirs in _dense_pairs(found) if theirs.dtype != mine.dtype)
    return ", ".join(f"{amount(count, 'tensor')} cast from {one} to {other}" for (one, other), count in pairs.items())


def _dense_pairs(found: Counterparts) -> Iterator[tuple[TensorRecord, TensorRecord]]:
    """The dense tensors of both that have bytes."""
    for mine, theirs in found.pairs:
        if not NOT_COMPARED & {mine.record.kind, theirs.record.kind}:
            yield from zip(mine.record.dense(), theirs.record.dense(), strict=False)


def _key(record: TensorRecord) -> tuple[str, str | None, int]:
    return record.name, record.storage, record.storage_offset
