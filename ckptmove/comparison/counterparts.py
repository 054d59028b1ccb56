"""Match the tensors and files of two checkpoints.

A tensor with several possible counterparts in other files is reported as ambiguous, not matched to one of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptmove.checkpoint.inventory.spellings import spellings
from ckptmove.checkpoint.naming import naming
from ckptmove.comparison.differences import Uncompared
from ckptmove.comparison.rekeyed import find_rekeyed
from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.checkpoint.inventory.spellings import Spelling
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.comparison.rekeyed import RekeyedOptimizer
    from ckptmove.model import TensorRecord

#: Key that matches a tensor across files of different names: the folder of its file, and its name in the file.
_TensorKey: TypeAlias = tuple[str, str]
#: Maximum number of files named in a message.
_SHOWN: Final = 4


class Stored(NamedTuple):
    """A tensor and the file that contains it."""

    part: OpenPart  # the file
    record: TensorRecord  # the tensor

    @property
    def own_name(self) -> str:
        """Name of the tensor inside the file."""
        return self.part.own_name(self.record.name)


@dataclass(slots=True)
class Counterparts:
    """Tensors and files of two checkpoints, matched for comparison."""

    pairs: list[tuple[Stored, Stored]] = field(default_factory=list)  # tensors that both have, in order
    removed: list[Stored] = field(default_factory=list)  # tensors that only the first has
    added: list[Stored] = field(default_factory=list)  # tensors that only the second has
    ambiguous: list[Uncompared] = field(default_factory=list)  # tensors with several possible counterparts
    parts: list[tuple[OpenPart, OpenPart]] = field(default_factory=list)  # files with the same path on both sides
    #: files with different paths that contain counterparts, by their names in the first and in the second.
    moved: dict[tuple[str, str], tuple[OpenPart, OpenPart]] = field(default_factory=dict)
    rekeyed: tuple[RekeyedOptimizer, ...] = ()  # with the same path, but other keys or another form


def find_counterparts(one: OpenCheckpoint, other: OpenCheckpoint) -> Counterparts:
    """Match the tensors of two checkpoints, and their files.

    Tensors with the same name, including the file, are counterparts. The rest may be in other files, for example if a
    model is split into a different number of shards, or merged into one file. Those are matched by their name inside
    the file, if exactly one tensor on each side has that name. Two directories are matched folder by folder, because
    they may contain several checkpoints.
    """
    found = Counterparts()
    theirs_by_place = {seen_from_top(other, part.name): part for part in other.parts}
    both = ((part, theirs_by_place.get(seen_from_top(one, part.name))) for part in one.parts)
    found.parts = [(mine, theirs) for mine, theirs in both if theirs is not None]
    ours, theirs = _by_name(one), _by_name(other)
    alike = {name for side in (ours, theirs) for name, group in side.items() if len(group) > 1}
    spelling_of = _spelled(ours, alike) | _spelled(theirs, alike)
    for name in dict.fromkeys((*ours, *theirs)):
        pairs, removed, added = _of_one_name(ours.get(name, []), theirs.get(name, []), spelling_of)
        found.pairs += pairs
        found.removed += removed
        found.added += added
    found.rekeyed = find_rekeyed(one, other)
    _look_by_parameter(found, one)
    _look_in_other_files(found, one, other)
    return found


def seen_from_top(side: OpenCheckpoint, path: str) -> str:
    """A path in a checkpoint, relative to the top folder if everything in an archive is inside one."""
    return path.removeprefix(side.top)


def _by_name(side: OpenCheckpoint) -> dict[str, list[Stored]]:
    """Tensors by name; a name has several if different paths in the tree are written alike."""
    found: dict[str, list[Stored]] = {}
    for part in side.parts:
        for record in part.inventory.tensors:
            found.setdefault(seen_from_top(side, record.name), []).append(Stored(part, record))
    return found


def _spelled(tensors: dict[str, list[Stored]], alike: set[str]) -> dict[int, Spelling]:
    """Spellings of the ambiguous names, by the ids of their records."""
    groups: dict[str, list[Stored]] = {}
    for name in alike:
        for stored in tensors.get(name, ()):
            groups.setdefault(stored.part.name, []).append(stored)
    found: dict[int, Spelling] = {}
    for group in groups.values():
        part = group[0].part
        own = [stored.record._replace(name=stored.own_name, storage=part.own_key(stored.record)) for stored in group]
        with naming(part.path):
            spelling_of = spellings(part.tree(), {record.name for record in own}, own, part.budget())
        pairs = zip(own, group, strict=True)
        found |= {id(stored.record): spelling_of[id(record)] for record, stored in pairs if id(record) in spelling_of}
    return found


def _of_one_name(
    mine: Sequence[Stored], theirs: Sequence[Stored], spelling_of: dict[int, Spelling]
) -> tuple[list[tuple[Stored, Stored]], list[Stored], list[Stored]]:
    """Pairs by spelling of the name, then in order for names that no key tells apart; and the rest of both sides."""
    by_spelling: dict[Spelling, deque[Stored]] = {}  # keys other than text and numbers may have the same spelling
    for stored in theirs:
        if id(stored.record) in spelling_of:
            by_spelling.setdefault(spelling_of[id(stored.record)], deque()).append(stored)
    pairs, left = [], []
    for stored in mine:
        alike = by_spelling.get(spelling_of[id(stored.record)]) if id(stored.record) in spelling_of else None
        if alike:
            pairs.append((stored, alike.popleft()))
        else:
            left.append(stored)
    taken = {id(counterpart) for _, counterpart in pairs}
    rest = [stored for stored in theirs if id(stored) not in taken]
    both = min(len(left), len(rest))
    return [*pairs, *zip(left, rest, strict=False)], left[both:], rest[both:]


def _look_by_parameter(found: Counterparts, one: OpenCheckpoint) -> None:
    """Pair unmatched state of optimizers that key their parameters differently on the other side."""
    if not found.rekeyed:
        return
    ours, theirs = ({stored.record.name: stored for stored in side} for side in (found.removed, found.added))
    for mine, other in chain.from_iterable(optimizer.tensors() for optimizer in found.rekeyed):
        if mine.name in ours and other.name in theirs:
            found.pairs.append((ours.pop(mine.name), theirs.pop(other.name)))
    paired = {id(stored.record) for pair in found.pairs for stored in pair}
    found.removed, found.added = (
        [stored for stored in side if id(stored.record) not in paired] for side in (found.removed, found.added)
    )
    _put_in_order(found, one)


def _put_in_order(found: Counterparts, one: OpenCheckpoint) -> None:
    records = chain.from_iterable(part.inventory.tensors for part in one.parts)
    order = {id(record): place for place, record in enumerate(records)}
    found.pairs.sort(key=lambda pair: order[id(pair[0].record)])


def _look_in_other_files(found: Counterparts, one: OpenCheckpoint, other: OpenCheckpoint) -> None:
    """Pair unmatched tensors by their names inside the files."""
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
            reason = f"the name is not unique: found in {_files(mine, one)} and in {_files(others, other)}"
            found.ambiguous.append(Uncompared(place[1], reason))
    if common:
        found.removed, found.added = list(chain(*ours.values())), list(chain(*theirs.values()))
        _put_in_order(found, one)


def _by_place(tensors: Iterable[Stored], side: OpenCheckpoint, *, by_folder: bool) -> dict[_TensorKey, list[Stored]]:
    found: dict[_TensorKey, list[Stored]] = {}
    for stored in tensors:
        folder = seen_from_top(side, stored.part.name).rpartition("/")[0] if by_folder else ""
        found.setdefault((folder, stored.own_name), []).append(stored)
    return found


def _files(tensors: Sequence[Stored], side: OpenCheckpoint) -> str:
    """Files of the tensors, as text for a message."""
    names = list(dict.fromkeys(stored.part.name for stored in tensors))
    return f"{some(names, _SHOWN)} of {side.path}" if names != [""] else side.path
