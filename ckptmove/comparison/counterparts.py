"""Which tensors of two checkpoints are counterparts, and which of their files.

Never takes one of several for the counterpart: what more than one would fit is said to be ambiguous.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptmove.checkpoint.inventory.spellings import spellings
from ckptmove.checkpoint.naming import naming
from ckptmove.comparison.differences import Uncompared
from ckptmove.comparison.rekeyed import find_twins

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.checkpoint.inventory.spellings import Spelling
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.comparison.rekeyed import Twins
    from ckptmove.model import TensorRecord

#: What both sides call something by: for a tensor in another file its folder, and its name in the file.
_Place: TypeAlias = tuple[str, str]
#: Files that are named in a sentence, of however many.
_SHOWN: Final = 4


class Stored(NamedTuple):
    """A tensor, and the file that it is in.

    Attributes:
        part: the file.
        record: the tensor.
    """

    part: OpenPart
    record: TensorRecord

    @property
    def own_name(self) -> str:
        """Its name inside of the file."""
        return self.part.own_name(self.record.name)


@dataclass(slots=True)
class Counterparts:
    """What of two checkpoints is to be held against each other.

    Attributes:
        pairs: tensors of both, in the order of the first.
        removed: tensors that only the first has.
        added: tensors that only the second has.
        ambiguous: tensors of which it is not known whether the other has them.
        parts: files that are at one place on both sides.
        moved: files at different places that hold counterparts: of the first, and of the second.
        twins: optimizers at one place on both sides that have other keys there.
    """

    pairs: list[tuple[Stored, Stored]] = field(default_factory=list)
    removed: list[Stored] = field(default_factory=list)
    added: list[Stored] = field(default_factory=list)
    ambiguous: list[Uncompared] = field(default_factory=list)
    parts: list[tuple[OpenPart, OpenPart]] = field(default_factory=list)
    moved: dict[tuple[str, str], tuple[OpenPart, OpenPart]] = field(default_factory=dict)
    twins: tuple[Twins, ...] = ()


def find_counterparts(one: OpenCheckpoint, other: OpenCheckpoint) -> Counterparts:
    """Match the tensors of two checkpoints, and their files.

    Those of one name, file and all, are counterparts. What is left may lie in other files, as a model does that is cut
    into another number of them, or gathered into one: it goes by its name inside of the file, if one tensor on either
    side has it. In two directories that is so in each folder, as there may be several checkpoints in them.
    """
    found = Counterparts()
    theirs_by_place = {seen_from_top(other, part.name): part for part in other.parts}
    both = ((part, theirs_by_place.get(seen_from_top(one, part.name))) for part in one.parts)
    found.parts = [(mine, theirs) for mine, theirs in both if theirs is not None]
    ours, theirs = _by_name(one), _by_name(other)
    alike = {name for side in (ours, theirs) for name, group in side.items() if len(group) > 1}
    told = _spelled(ours, alike) | _spelled(theirs, alike)
    for name in dict.fromkeys((*ours, *theirs)):
        pairs, removed, added = _of_one_name(ours.get(name, []), theirs.get(name, []), told)
        found.pairs += pairs
        found.removed += removed
        found.added += added
    found.twins = find_twins(one, other)
    _look_by_parameter(found, one)
    _look_in_other_files(found, one, other)
    return found


def seen_from_top(side: OpenCheckpoint, path: str) -> str:
    """A path in a checkpoint, seen from the folder that everything in an archive lies in."""
    return path.removeprefix(side.top)


def _by_name(side: OpenCheckpoint) -> dict[str, list[Stored]]:
    """The tensors by name; several where two paths read alike."""
    found: dict[str, list[Stored]] = {}
    for part in side.parts:
        for record in part.inventory.tensors:
            found.setdefault(seen_from_top(side, record.name), []).append(Stored(part, record))
    return found


def _spelled(tensors: dict[str, list[Stored]], alike: set[str]) -> dict[int, Spelling]:
    """How the names are spelled that read alike, by the identities of the records."""
    groups: dict[str, list[Stored]] = {}
    for name in alike:
        for stored in tensors.get(name, ()):
            groups.setdefault(stored.part.name, []).append(stored)
    found: dict[int, Spelling] = {}
    for group in groups.values():
        part = group[0].part
        own = [stored.record._replace(name=stored.own_name, storage=part.own_key(stored.record)) for stored in group]
        with naming(part.path):
            told = spellings(part.tree(), {record.name for record in own}, own, part.budget())
        pairs = zip(own, group, strict=True)
        found |= {id(stored.record): told[id(record)] for record, stored in pairs if id(record) in told}
    return found


def _of_one_name(
    mine: Sequence[Stored], theirs: Sequence[Stored], told: dict[int, Spelling]
) -> tuple[list[tuple[Stored, Stored]], list[Stored], list[Stored]]:
    """Pairs by how the name is spelled, then, of those that no key tells apart, in order; and what is left of both."""
    by_spelling: dict[Spelling, deque[Stored]] = {}  # keys that are no text, nor numbers, may be spelled alike, too
    for stored in theirs:
        if id(stored.record) in told:
            by_spelling.setdefault(told[id(stored.record)], deque()).append(stored)
    pairs, left = [], []
    for stored in mine:
        alike = by_spelling.get(told[id(stored.record)]) if id(stored.record) in told else None
        if alike:
            pairs.append((stored, alike.popleft()))
        else:
            left.append(stored)
    taken = {id(counterpart) for _, counterpart in pairs}
    rest = [stored for stored in theirs if id(stored) not in taken]
    both = min(len(left), len(rest))
    return [*pairs, *zip(left, rest, strict=False)], left[both:], rest[both:]


def _look_by_parameter(found: Counterparts, one: OpenCheckpoint) -> None:
    """Pair what is left of the state of optimizers whose parameters go by other keys on the other side."""
    if not found.twins:
        return
    ours, theirs = ({stored.record.name: stored for stored in side} for side in (found.removed, found.added))
    for mine, other in chain.from_iterable(twin.tensors() for twin in found.twins):
        if mine.name in ours and other.name in theirs:
            found.pairs.append((ours.pop(mine.name), theirs.pop(other.name)))
    paired = {id(stored.record) for pair in found.pairs for stored in pair}
    found.removed, found.added = (
        [stored for stored in side if id(stored.record) not in paired] for side in (found.removed, found.added)
    )
    _put_in_order(found, one)


def _put_in_order(found: Counterparts, one: OpenCheckpoint) -> None:
    order = {id(record): place for place, record in enumerate(_records(one))}
    found.pairs.sort(key=lambda pair: order[id(pair[0].record)])


def _look_in_other_files(found: Counterparts, one: OpenCheckpoint, other: OpenCheckpoint) -> None:
    """Pair what is left by its name inside of the file."""
    by_folder = not (one.is_whole or other.is_whole)
    if one.is_whole and other.is_whole:
        return
    ours = _by_place(found.removed, one, by_folder=by_folder)
    theirs = _by_place(found.added, other, by_folder=by_folder)
    common = [place for place in ours if place in theirs]
    for place in common:
        mine, others = ours.pop(place), theirs.pop(place)
        if len(mine) == len(others) == 1:
            found.pairs.append((mine[0], others[0]))
            parts = mine[0].part, others[0].part
            found.moved[parts[0].name, parts[1].name] = parts
        else:
            reason = f"by this name it is in {_files(mine, one)}, and in {_files(others, other)}"
            found.ambiguous.append(Uncompared(place[1], reason))
    if common:
        found.removed, found.added = list(chain(*ours.values())), list(chain(*theirs.values()))
        _put_in_order(found, one)


def _by_place(tensors: Iterable[Stored], side: OpenCheckpoint, *, by_folder: bool) -> dict[_Place, list[Stored]]:
    found: dict[_Place, list[Stored]] = {}
    for stored in tensors:
        folder = seen_from_top(side, stored.part.name).rpartition("/")[0] if by_folder else ""
        found.setdefault((folder, stored.own_name), []).append(stored)
    return found


def _files(tensors: Sequence[Stored], side: OpenCheckpoint) -> str:
    """Where tensors are, for people."""
    names = list(dict.fromkeys(stored.part.name for stored in tensors))
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more} of {side.path}" if names != [""] else side.path


def _records(side: OpenCheckpoint) -> Iterable[TensorRecord]:
    return chain.from_iterable(part.inventory.tensors for part in side.parts)
