"""Two checkpoints side by side: which tensors both have, how they differ, and what else does.

Never holds a tensor in memory whose elements lie in order, and never unpickles: bytes are compared as they lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.checkpoint import naming, open_checkpoint
from ckptmove.differences import Change, DiffResult, Gap, Uncompared
from ckptmove.dtypes import PACKED
from ckptmove.elements import blocks, extent, is_dense, overlaps, raw_blocks
from ckptmove.inventory.difference import tree_changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptmove.checkpoint import Checkpoint
    from ckptmove.contracts import Progress
    from ckptmove.differences import What
    from ckptmove.model import Inventory, Limits, TensorRecord

    #: How far two blocks of equally many elements lie apart, each with its dtype; None where that cannot be said.
    Measure: TypeAlias = Callable[[bytes, str, bytes, str], Gap | None]

#: Kinds of tensors whose elements are in no storage: there are none, or they are in the pickle.
_WITHOUT_BYTES: Final = frozenset({"meta", "device-data"})
#: Between the path of something in a pickled module and the name that its state_dict gives it.
_MODULE_PARTS: Final = frozenset({"_modules", "_parameters", "_buffers"})


def compare_files(first: str, second: str, limits: Limits, measure: Measure, progress: Progress | None) -> DiffResult:
    """Compare two checkpoints.

    Args:
        first: a file.
        second: another one.
        limits: what each of them may ask for.
        measure: how far values lie apart; asked for blocks that are not the same bytes.
        progress: told of bytes of tensors compared and bytes in all, as they are in the first.

    Raises:
        UnreadableInput: one of them cannot be read, is damaged, or is no checkpoint.
        LimitExceeded: one of them asks for more than the limits allow.
    """
    with naming(first), open_checkpoint(first, limits) as one, naming(second), open_checkpoint(second, limits) as other:
        return compare(one, other, measure, progress)


def compare(one: Checkpoint, other: Checkpoint, measure: Measure, progress: Progress | None) -> DiffResult:
    """Compare two open checkpoints.

    Arguments and errors as of :func:`compare_files`.
    """
    return _Comparison(one, other, measure, progress).result()


class _Comparison:
    """Goes through both, tensor by tensor in the order of the first."""

    def __init__(self, one: Checkpoint, other: Checkpoint, measure: Measure, progress: Progress | None) -> None:
        self._one = one
        self._other = other
        self._measure = measure
        self._progress = progress
        self._done = 0
        self._total = 0
        self._changed: list[Change] = []
        self._uncompared: list[Uncompared] = []

    def result(self) -> DiffResult:
        ours, theirs = _by_name(self._one.inventory), _by_name(self._other.inventory)
        removed = [name for name, records in ours.items() for _ in records[len(theirs.get(name, ())) :]]
        added = [name for name, records in theirs.items() for _ in records[len(ours.get(name, ())) :]]
        pairs = [pair for name, records in ours.items() for pair in zip(records, theirs.get(name, ()), strict=False)]
        self._total = sum(record.nbytes for record, _ in pairs)
        for mine, other in pairs:
            self._pair(mine, other)
        known = {*ours, *theirs}
        return DiffResult(
            first=self._one.inventory.path,
            second=self._other.inventory.path,
            tensors=len(pairs),
            added=tuple(added),
            removed=tuple(removed),
            changed=(*self._changed, *self._objects(known)),
            uncompared=tuple(self._uncompared),
        )

    def _pair(self, mine: TensorRecord, other: TensorRecord) -> None:
        """Two tensors of one name."""
        for (what, before), (_, after) in zip(_properties(mine), _properties(other), strict=True):
            if before != after:
                self._changed.append(Change(mine.name, what, before, after))
        if (mine.kind, mine.shape) == (other.kind, other.shape):
            if mine.stride != other.stride:
                self._changed.append(Change(mine.name, "object", f"stride {mine.stride}", f"stride {other.stride}"))
            parts = mine.dense(), other.dense()
            if [part.shape for part in parts[0]] == [part.shape for part in parts[1]]:
                for part, counterpart in zip(*parts, strict=True):
                    self._values(part, counterpart)
            else:  # sparse ones with another number of values
                self._changed.append(Change(mine.name, "value", _sizes(mine), _sizes(other)))
        self._done += mine.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _values(self, mine: TensorRecord, other: TensorRecord) -> None:
        """The elements of two dense tensors of one shape."""
        if _WITHOUT_BYTES & {mine.kind, other.kind}:
            return
        spans = extent(self._one.container, mine), extent(self._other.container, other)
        if spans[0] is None or spans[1] is None:
            reasons = self._why_not(self._one, mine), self._why_not(self._other, other)
            self._uncompared.append(Uncompared(mine.name, "; ".join(filter(None, reasons))))
            return
        alike = (mine.stride, mine.dtype) == (other.stride, other.dtype)
        share = overlaps(mine) or overlaps(other) or mine.dtype in PACKED
        if share and not alike:
            self._uncompared.append(Uncompared(mine.name, "its elements share bytes in another way"))
            return
        # Elements without gaps in one order on both sides need not be put into torch's order first.
        read = raw_blocks if alike and (share or is_dense(mine)) else blocks
        sides = read(self._one.container, mine, spans[0]), read(self._other.container, other, spans[1])
        differ, gap = self._gap(zip(*sides, strict=True), mine.dtype, other.dtype)
        if differ:
            self._changed.append(Change(mine.name, "value", _sizes(mine), _sizes(other), gap))

    def _why_not(self, side: Checkpoint, record: TensorRecord) -> str:
        """Why the bytes of a tensor cannot be read as they lie; empty where they can."""
        if extent(side.container, record) is not None:
            return ""
        facts = {fact.storage_key: fact.kind for fact in side.inventory.facts}
        if facts.get(record.storage or "") == "compressed-storage":
            return f"compressed in {side.inventory.path}: ckptmove convert stores it plainly"
        return f"missing or cut off in {side.inventory.path}"

    def _gap(self, pairs: Iterable[tuple[bytes, bytes]], dtype: str, other: str) -> tuple[bool, Gap | None]:
        """Whether any block differs from its counterpart, and how far they lie apart."""
        differ, gap = False, Gap(0.0, 0.0)
        for one, two in pairs:
            if dtype == other and one == two:
                continue
            found = self._measure(one, dtype, two, other)
            if found is None:
                return dtype == other, None
            # Zero and minus zero, or two NaN, are other bits: of one dtype that is a difference.
            differ = differ or dtype == other or found.max_abs > 0
            gap = Gap(max(gap.max_abs, found.max_abs), max(gap.max_rel, found.max_rel))
        return differ, gap if differ else None

    def _objects(self, known: set[str]) -> Iterator[Change]:
        """What differs besides tensors: everything in the trees that is not a part of one, and what is in no tree."""
        ours, theirs = dict(self._one.container.extras()), dict(self._other.container.extras())
        for name in (*ours, *(name for name in theirs if name not in ours)):
            if ours.get(name) != theirs.get(name):
                yield Change(name, "object", _digest(ours.get(name)), _digest(theirs.get(name)))
        parents = {name[:place] for name in known for place in _dots(name)}
        for one in tree_changes(self._other.machine.root, (), self._one.machine.root, ()):
            if _stands_in(self._one, one.theirs) and _stands_in(self._other, one.ours):
                continue  # for a long string: those are compared above
            name = ".".join(part for part in one.path.split(".") if part not in _MODULE_PARTS)
            if name in known or name in parents or any(name[:place] in known for place in _dots(name)):
                continue
            yield Change(one.path, "object", one.theirs, one.ours)


def _by_name(inventory: Inventory) -> dict[str, list[TensorRecord]]:
    """The tensors by name; several where two paths read alike."""
    found: dict[str, list[TensorRecord]] = {}
    for record in inventory.tensors:
        found.setdefault(record.name, []).append(record)
    return found


def _stands_in(side: Checkpoint, shown: str) -> bool:
    placeholder = side.container.placeholder
    return bool(placeholder) and placeholder in shown


def _digest(found: bytes | None) -> str:
    return "absent" if found is None else f"sha256 {found.hex()[:12]}"


def _dots(name: str) -> Iterator[int]:
    return (place for place, letter in enumerate(name) if letter == ".")


def _properties(record: TensorRecord) -> tuple[tuple[What, str], ...]:
    """What a tensor is besides its values. Where shapes differ strides do, and are not told of."""
    grad = ", requires_grad" if record.requires_grad else ""
    return (
        ("object", f"{record.kind}{f' {record.subclass}' if record.subclass else ''}{grad}"),
        ("role", record.role),
        ("device", record.device),
        ("dtype", record.dtype),
        ("shape", _sizes(record)),
    )


def _sizes(record: TensorRecord) -> str:
    return f"[{', '.join(map(str, record.shape))}]"
