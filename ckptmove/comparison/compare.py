"""Compare two checkpoints: first their tensors by structure and value, then everything else.

Values are compared block by block; nothing is unpickled.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.checkpoint.elements import fills_extent, overlaps
from ckptmove.checkpoint.open_checkpoint import side_by_side
from ckptmove.checkpoint.state_dicts import WRAPPERS
from ckptmove.comparison.counterparts import find_counterparts
from ckptmove.comparison.differences import Change, Differences, Uncompared
from ckptmove.comparison.gaps import gap_between
from ckptmove.comparison.one_file import as_one_file
from ckptmove.comparison.other_content import OtherContent
from ckptmove.errors import DamagedArchive, LimitExceeded, Refused, UsageError
from ckptmove.lazy.geometry import extent_numel, is_contiguous
from ckptmove.lazy.tensor import blocks
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.text import amount, some
from ckptmove.torch_facts.devices import NO_DEVICE
from ckptmove.torch_facts.dtypes import ITEM_BYTES, PACKED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.comparison.counterparts import Counterparts, Stored
    from ckptmove.comparison.differences import Gap, What
    from ckptmove.comparison.gaps import Measure
    from ckptmove.io.contracts import Progress
    from ckptmove.limits import Limits
    from ckptmove.model import TensorRecord

    #: Location and layout of elements: file, storage, offset in it, dtype, shape and stride.
    _Elements: TypeAlias = tuple[str, str | None, int, str, tuple[int, ...], tuple[int, ...]]

#: Kinds of tensors without elements in a storage of their own: meta tensors have no elements, "device-data" tensors
#: have them in the pickle, and wrapper subclasses have inner tensors, which are compared under their own names.
_WITHOUT_BYTES: Final = frozenset({"meta", "device-data", "wrapper-subclass"})
#: Kinds that store their elements in the same way.
_DENSE: Final = frozenset({"tensor", "parameter"})
#: Bytes that may be read for each byte of the files. Only bytes of overlapping views are read more than once.
_MOST_PER_BYTE: Final = 64
#: Bytes that may be read in addition, for files of any size.
_IN_ANY_CASE: Final = 2**30


def compare(first: str, second: str, limits: Limits, measure: Measure, progress: Progress | None) -> Differences:
    """Compare two checkpoints.

    Args:
        first: a file, a directory or an archive of files.
        measure: measures the distance between values; called for blocks whose bytes differ.
        progress: called with the tensor bytes compared so far and the total, as sizes in the first checkpoint.
    """
    with open_checkpoint(first, limits) as one, open_checkpoint(second, limits) as other:
        sides = side_by_side(*_gathered(one, other, limits))
        result = TensorComparison(*sides, limits, measure, progress).result(find_counterparts(*sides))
        for side in (one, other):
            if side.traffic is not None:
                side.require_unchanged()
        requests = tuple(f"{side.path}: {side.traffic_note}" for side in (one, other) if side.traffic_note)
        return replace(result, notes=(*result.notes, *requests))


def _gathered(one: OpenCheckpoint, other: OpenCheckpoint, limits: Limits) -> tuple[OpenCheckpoint, OpenCheckpoint]:
    """Both sides; if only one of them is a file, the other as the file that ``convert`` writes for it, if it can."""
    files = [side for side in (one, other) if side.listing is None]
    if len(files) != 1:
        return one, other
    try:
        found = [as_one_file(side, files[0], limits) if side.listing else side for side in (one, other)]
    except (UsageError, Refused, DamagedArchive):
        return one, other  # compared file by file
    return found[0], found[1]


class TensorComparison:
    """Compares two checkpoints tensor by tensor, in the order of the first."""

    def __init__(
        self,
        one: OpenCheckpoint,
        other: OpenCheckpoint,
        limits: Limits,
        measure: Measure,
        progress: Progress | None = None,
    ) -> None:
        self._one = one
        self._other = other
        self._most_read = limits.factor * (_IN_ANY_CASE + _MOST_PER_BYTE * (one.nbytes + other.nbytes))
        self._read = 0
        self._measure = measure
        self._progress = progress
        self._done = 0
        self._total = 0
        self._nowhere = 0
        #: Results for elements that several names may share, by their location and layout on both sides.
        self._compared: dict[tuple[_Elements, _Elements], tuple[bool, Gap | None]] = {}
        self._changed: list[Change] = []
        self._uncompared: list[Uncompared] = []

    def result(self, found: Counterparts) -> Differences:
        """Compare pairs of tensors and files."""
        self._total = sum(mine.record.nbytes for mine, _ in found.pairs)
        for mine, other in found.pairs:
            self._pair(mine, other)
        rest = OtherContent(self._one, self._other, found, devices_count=True)
        rest.compare()
        return Differences(
            first=self._one.path,
            second=self._other.path,
            tensors=len(found.pairs),
            added=tuple(stored.record.name for stored in found.added),
            removed=tuple(stored.record.name for stored in found.removed),
            changed=(*self._changed, *rest.changed),
            uncompared=(*self._uncompared, *found.ambiguous, *rest.uncompared),
            notes=(*rest.notes, *self._notes(found)),
        )

    def _notes(self, found: Counterparts) -> Iterator[str]:
        if self._nowhere:
            yield f"device not compared for {amount(self._nowhere, 'tensor')}: one side stores none"
        ours, theirs = ({_unwrapped(one.record.name) for one in side} for side in (found.removed, found.added))
        if ours & theirs:
            count = amount(len(ours & theirs), "tensor")
            yield f"same name on both sides, except for the prefix of a wrapper ({', '.join(WRAPPERS)}): {count}"
        parted = _shared_otherwise(found.pairs)
        if parted:
            yield f"{some(parted)}: storage shared with another tensor on one side only (tied weights or a view)"

    def _pair(self, one: Stored, two: Stored) -> None:
        mine, other = one.record, two.record
        # A distributed checkpoint stores neither the strides nor the Python class of a tensor.
        keeps_less = one.part.is_distributed or two.part.is_distributed
        properties = (_properties(record, keeps_less=keeps_less) for record in (mine, other))
        for (what, before), (_, after) in zip(*properties, strict=True):
            # Devices are compared only if both sides store one.
            guessed = what == "device" and before != after and NO_DEVICE in {before, after}
            self._nowhere += guessed
            # Roles depend on file names: under a different file name, the role may be unknown ("other").
            guessed |= what == "role" and "other" in {before, after} and one.part.name != two.part.name
            if before != after and not guessed:
                self._changed.append(Change(mine.name, what, before, after))
        if mine.shape == other.shape and (mine.kind == other.kind or {mine.kind, other.kind} == _DENSE):
            if mine.stride != other.stride and not keeps_less:
                self._changed.append(Change(mine.name, "object", f"stride {mine.stride}", f"stride {other.stride}"))
            parts = mine.dense(), other.dense()
            if [part.shape for part in parts[0]] == [part.shape for part in parts[1]]:
                for part, counterpart in zip(*parts, strict=True):
                    self._values(one._replace(record=part), two._replace(record=counterpart))
            else:  # sparse tensors with different numbers of values
                self._changed.append(Change(mine.name, "value", _sizes(mine), _sizes(other)))
        elif mine.shape == other.shape:
            reason = f"stored as {mine.kind} on one side, as {other.kind} on the other"
            self._uncompared.append(Uncompared(mine.name, reason))
        self._done += mine.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _values(self, one: Stored, two: Stored) -> None:
        """Compare the elements of two dense tensors of the same shape."""
        mine, other = one.record, two.record
        if _WITHOUT_BYTES & {mine.kind, other.kind}:
            return
        # Elements that ``expand`` repeats on both sides are compared once, and counted as often as they occur.
        steps = zip(mine.shape, mine.stride, other.stride, strict=True)
        shape = tuple([size if step or counterpart else min(size, 1) for size, step, counterpart in steps])
        times = prod(mine.shape) // max(prod(shape), 1)
        mine, other = mine._replace(shape=shape), other._replace(shape=shape)
        alike = mine.stride == other.stride and mine.dtype == other.dtype
        share = (overlaps(mine) and overlaps(other)) or mine.dtype in PACKED
        place = _elements(one, mine), _elements(two, other)
        # Elements that are dense and in the same order on both sides need not be put into torch's order first.
        if share or (mine.stride == other.stride and fills_extent(mine)):
            mine, other = _as_stored(mine), _as_stored(other)
        first, second = one.part.elements(mine), two.part.elements(other)
        if first is None or second is None:
            lacking = [stored for stored, found in ((one, first), (two, second)) if found is None]
            reasons = "; ".join(stored.part.why_not(stored.record) for stored in lacking)
            self._uncompared.append(Uncompared(mine.name, reasons))
            return
        if share and not alike:
            self._uncompared.append(Uncompared(mine.name, "its elements overlap in a different way on each side"))
            return
        if place not in self._compared:
            self._spend(_extent_bytes(mine) + _extent_bytes(other))
            pairs = zip(map(bytes, blocks(first)), map(bytes, blocks(second)), strict=True)
            self._compared[place] = gap_between(pairs, mine.dtype, second.dtype, self._measure)
        differ, gap = self._compared[place]
        if differ:
            change = Change(mine.name, "value", _sizes(one.record), _sizes(two.record), gap and gap.repeated(times))
            self._changed.append(change)

    def _spend(self, nbytes: int) -> None:
        """Count the bytes read: a small file can hold very many overlapping views, all of them different."""
        self._read += nbytes
        if self._read > self._most_read:
            raise LimitExceeded(
                "the bytes of overlapping tensors",
                limit=self._most_read,
                actual=self._read,
                path=self._one.path,
            )


def _shared_otherwise(pairs: Sequence[tuple[Stored, Stored]]) -> list[str]:
    """Names of tensors that share a storage with another tensor on one side only."""
    ours: dict[object, object] = {}
    theirs: dict[object, object] = {}
    found = []
    for mine, other in pairs:
        if mine.record.storage is not None and other.record.storage is not None:
            here, there = (mine.part.name, mine.record.storage), (other.part.name, other.record.storage)
            if ours.setdefault(here, there) != there or theirs.setdefault(there, here) != here:
                found.append(mine.record.name)
    return found


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if f"{part}." not in WRAPPERS)


def _elements(stored: Stored, record: TensorRecord) -> _Elements:
    return stored.part.name, record.storage, record.storage_offset, record.dtype, record.shape, record.stride


def _as_stored(record: TensorRecord) -> TensorRecord:
    """The elements of a tensor's extent in the order of the file, with gaps."""
    if is_contiguous(record.shape, record.stride):
        return record
    return record._replace(shape=(extent_numel(record.shape, record.stride),), stride=(1,))


def _extent_bytes(record: TensorRecord) -> int:
    return extent_numel(record.shape, record.stride) * ITEM_BYTES[record.dtype]


def _properties(record: TensorRecord, *, keeps_less: bool) -> tuple[tuple[What, str], ...]:
    """Properties of a tensor except its values and its stride, which differs whenever the shape does."""
    grad = ", requires_grad" if record.requires_grad else ""
    subclass = f" {record.subclass}" if record.subclass and not keeps_less else ""
    kind = "tensor" if keeps_less and record.kind == "parameter" else record.kind
    return (
        ("object", f"{kind}{subclass}{grad}"),
        ("role", record.role),
        ("device", record.device),
        ("dtype", record.dtype),
        ("shape", _sizes(record)),
    )


def _sizes(record: TensorRecord) -> str:
    return f"[{', '.join(map(str, record.shape))}]"
