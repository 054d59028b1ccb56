"""Compare the content of two checkpoints other than tensors: objects, code, other files.

Content without a counterpart is reported as a change, or a note says that it was not compared.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.difference import TreeChange, kept_changes, tree_changes
from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.checkpoint.inventory.tensor_nodes import TensorNodes
from ckptmove.comparison.counterparts import seen_from_top
from ckptmove.comparison.differences import Change, Uncompared
from ckptmove.comparison.rekeyed import ABSENT
from ckptmove.formats.dcp.checkpoint import UNREAD
from ckptmove.formats.facts import facts_of
from ckptmove.model import OPAQUE
from ckptmove.opening.detect import is_index
from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.comparison.counterparts import Counterparts
    from ckptmove.comparison.rekeyed import RekeyedOptimizer
    from ckptmove.io.listing import Listing
    from ckptmove.model import Inventory

#: Path components of a pickled module that its state_dict leaves out of names.
_MODULE_PARTS: Final = frozenset({"_modules", "_parameters", "_buffers"})
#: Maximum number of files named in a note.
_SHOWN: Final = 4
#: Number of digits shown of a SHA-256.
_DIGITS: Final = 12
#: Keys of an optimizer's state_dict, flat or not.
_PARTS: Final = ("state", "param_groups")


class OtherContent:
    """Compares all content other than tensors.

    Attributes:
        changed: differences.
        uncompared: objects that may differ.
        notes: notes on content that was not compared, or not compared as stored.
    """

    def __init__(self, one: OpenCheckpoint, other: OpenCheckpoint, found: Counterparts, *, devices_count: bool) -> None:
        """Prepare the comparison of two checkpoints, with the flags that follow devices if these count."""
        self._devices_count = devices_count
        self._one = one
        self._other = other
        self._found = found
        self.changed: list[Change] = []
        self.uncompared: list[Uncompared] = []
        self.notes: list[str] = []

    def compare(self) -> None:
        """Compare the parts, then the other files."""
        self._moved()
        for mine, other in self._found.parts:
            self._part(mine, other)
        self._alone()
        if self._one.listing is not None and self._other.listing is not None:
            self.changed += self._others()
        else:
            for side in (self._one, self._other):
                self._note_on(side.others, f" of {side.path}: not compared, because the other side is a single file")
        self._passed_over()

    # --- files that are checkpoints ------------------------------------------------------------------------------

    def _moved(self) -> None:
        """Compare files whose tensors are in other files on the other side, if each has a single counterpart."""
        moved = list(self._found.moved.values())
        if not moved:
            return
        ours, theirs = ({part.name: part for part in side} for side in zip(*moved, strict=True))
        places = f"{_named(ours, self._one)}, and {_named(theirs, self._other)}"
        self.notes.append(f"tensors matched by name, because their files differ: {places}")
        matched = {id(part) for pair in self._found.parts for part in pair}
        times = Counter(id(part) for pair in moved for part in pair)
        rest: dict[int, OpenPart] = {}
        for mine, other in moved:
            if times[id(mine)] == times[id(other)] == 1 and not matched & {id(mine), id(other)}:
                self._part(mine, other)
            else:
                rest |= {id(part): part for part in (mine, other) if id(part) not in matched}
        # Files that are split or merged on the other side need a note, unless they contain only tensors.
        parts = rest.values()
        if not all(map(_is_table, parts)) or len({tuple(sorted(part.extras().items())) for part in parts}) > 1:
            self._note_on([part.name or part.path for part in parts], ": only tensors were compared")

    def _part(self, mine: OpenPart, other: OpenPart) -> None:
        """Compare everything in the trees that is not part of a tensor, and content outside the trees."""
        for part in (mine, other):
            for name in part.lost():
                self.uncompared.append(Uncompared(part.full_name(name), f"missing or cut off in {part.path}"))
        objects = ObjectComparison(mine, other, self._found.rekeyed)
        sites = self._following(mine), self._following(other)
        kept = objects.kept_changes(sites) if objects.keeps_less else ()
        found = chain(kept, objects.rekeyed_changes(flags_count=self._devices_count))
        lost = [mine.full_name(name) for part in (mine, other) for name in part.lost()]
        placed = (one._replace(path=mine.full_name(one.path)) for one in found)
        self.changed += (Change(one.path, "object", one.ours, one.theirs) for one in _without(placed, lost))
        self.notes += objects.notes
        if objects.is_mixed:
            return
        ours, theirs = mine.extras(), other.extras()
        for name in dict.fromkeys((*ours, *theirs)):
            before, after = ours.get(name), theirs.get(name)
            # Objects of a distributed checkpoint are also in its tree, where the comparison finds absent ones.
            if before != after and not (mine.is_distributed and None in {before, after}):
                self.changed.append(Change(mine.full_name(name), "object", _digest(before), _digest(after)))
        if not objects.keeps_less:
            self.changed += _tree_changes(mine, other, objects, sites)
        self.changed += self._of_ranks(mine, other)

    def _of_ranks(self, mine: OpenPart, other: OpenPart) -> Iterator[Change]:
        """Differences of files of ranks that the tree of the part lacks: their devices, and objects of later ranks."""
        if not mine.members or not other.members:
            return
        if not self._devices_count or len(mine.members) != len(other.members):
            self.notes.append("files of ranks: sharded tensors were compared, and of the rest that of the first rank")
            return
        unlike = sorted({*mine.differing, *other.differing})
        if unlike:
            self.notes.append(f"differs between ranks, compared for the first rank only: {some(unlike, _SHOWN)}")
        for ours, theirs in zip(mine.rows, other.rows, strict=True):
            if ours.devices != theirs.devices:
                yield Change(ours.path, "device", ", ".join(ours.devices), ", ".join(theirs.devices))
        for one, two in [*zip(mine.members.values(), other.members.values(), strict=True)][1:]:
            yield from _tree_changes(one, two, ObjectComparison(one, two, ()), ((), ()))

    def _following(self, part: OpenPart) -> Collection[int]:
        """Sites in the pickle of a part that are not compared, because they follow the device."""
        return () if self._devices_count or part.is_distributed else device_sites(part.inventory, part.base)

    def _alone(self) -> None:
        """Report files that only one side has, unless their tensors are in other files of the other side."""
        for index, (side, rival) in enumerate(((self._one, self._other), (self._other, self._one))):
            places = {seen_from_top(rival, part.name) for part in rival.parts}
            moved = {names[index] for names in self._found.moved}
            for part in side.parts:
                if part.name and part.name not in moved and seen_from_top(side, part.name) not in places:
                    states = f"a checkpoint ({part.inventory.container})", "absent"
                    self.changed.append(Change(part.name, "object", *(states if index == 0 else reversed(states))))

    # --- the others ----------------------------------------------------------------------------------------------

    def _others(self) -> Iterator[Change]:
        ours, theirs = ({seen_from_top(side, path): path for path in side.others} for side in (self._one, self._other))
        indices = []
        for place in dict.fromkeys((*ours, *theirs)):
            if self._found.moved and is_index(place.rpartition("/")[2]):
                indices.append(ours.get(place) or theirs[place])
                continue
            before = self._one.described(ours[place]) if place in ours else "absent"
            after = self._other.described(theirs[place]) if place in theirs else "absent"
            if before == after:
                continue
            if self._is_same_index(ours.get(place), theirs.get(place)):
                indices.append(ours[place])
            else:
                yield Change(ours.get(place) or theirs[place], "object", _short(before), _short(after))
        self._note_on(indices, ": not compared, because an index only maps tensors to files")

    def _is_same_index(self, mine: str | None, other: str | None) -> bool:
        """Whether two files are indexes of shards that differ only in their metadata."""
        if mine is None or other is None or not is_index(mine.rpartition("/")[2]):
            return False
        if mine in self._one.links or other in self._other.links:
            return False
        return self._one.weight_map(mine) == self._other.weight_map(other)

    def _passed_over(self) -> None:
        """Add notes on hidden and empty folders: they are not compared, and do not count as differences."""
        listed = [(side, side.listing) for side in (self._one, self._other) if side.listing is not None]
        hidden = [seen_from_top(side, file.path) for side, own in listed for file in own.files if file.is_hidden]
        self._note_on(dict.fromkeys(hidden), ": not compared, because hidden files are skipped")
        empty = Counter(f"{seen_from_top(side, path)}/" for side, own in listed for path in _empty_folders(own))
        lone = [path for path, sides in empty.items() if sides == 1]
        self._note_on(lone, ": not compared, because empty folders are skipped")

    def _note_on(self, names: Iterable[str], what: str) -> None:
        listed = list(names)
        if listed:
            self.notes.append(f"{some(listed, _SHOWN)}{what}")


def device_sites(inventory: Inventory, base: int = 0) -> frozenset[int]:
    """Starts of the operations that a conversion may change: of tags, named devices, flags, and storage classes."""
    sites: set[int | None] = set()
    for storage in inventory.storages:
        sites.update(storage.tag_sites, storage.class_sites)
    for record in inventory.tensors:
        sites.update(part.device_site for part in (record, *record.parts))
    for mention in inventory.mentions:
        sites |= {mention.site, mention.index_site, mention.tuple_site}
    for optimizer in inventory.optimizers:
        sites.update(flag.site for group in optimizer.groups for flag in group.flags)
    return frozenset(site - base for site in sites if site is not None)


def _tree_changes(
    mine: OpenPart, other: OpenPart, objects: ObjectComparison, sites: tuple[Collection[int], Collection[int]]
) -> Iterator[Change]:
    named = {record.name for record in mine.inventory.tensors}
    named |= {mine.full_name(other.own_name(record.name)) for record in other.inventory.tensors}
    lost = [mine.full_name(name) for part in (mine, other) for name in part.lost()]

    def is_apart(path: str, key: str) -> bool:
        return objects.is_apart(mine.own_name(path), key)

    found = tree_changes(other.tree(), sites[1], mine.tree(), sites[0], mine.name, TensorNodes(), is_apart)
    for one in _without(found, lost):
        if mine.represents_extra(one.theirs) and other.represents_extra(one.ours):
            continue  # a long string, which is compared as an extra
        if one.is_lone_tensor and ".".join(part for part in one.path.split(".") if part not in _MODULE_PARTS) in named:
            continue  # already reported as added or removed
        yield Change(one.path, "object", one.theirs, one.ours)


def _empty_folders(listing: Listing) -> Iterator[str]:
    parents = {path.rpartition("/")[0] for path in (*listing.names, *(folder.path for folder in listing.folders))}
    return (folder.path for folder in listing.folders if folder.path and folder.path not in parents)


def _without(changes: Iterable[TreeChange], lost: Sequence[str]) -> Iterator[TreeChange]:
    """Changes without those in content that is missing or cut off, which is reported as uncompared."""
    for one in changes:
        is_absent = "absent" in {one.ours, one.theirs}
        if not any(one.path == name or (is_absent and name.startswith(f"{one.path}.")) for name in lost):
            yield one


def _is_table(part: OpenPart) -> bool:
    """Whether a file holds a dict of tensors and nothing else in its tree."""
    pairs = as_dict(part.tree())
    names = {part.own_name(record.name) for record in part.inventory.tensors}
    return pairs is not None and all(type(key) is str and key in names for key in pairs.keys())


def _named(parts: Mapping[str, OpenPart], side: OpenCheckpoint) -> str:
    return side.path if list(parts) == [""] else f"{some(list(parts), _SHOWN)} of {side.path}"


def _digest(found: bytes | None) -> str:
    return "absent" if found is None else _short(f"sha256 {found.hex()}")


def _short(described: str) -> str:
    return described[: len("sha256 ") + _DIGITS] if described.startswith("sha256 ") else described


class ObjectComparison:
    """Comparison of the objects other than tensors in two parts.

    Attributes:
        keeps_less: whether a part is a distributed checkpoint or a file of safetensors, which store less than others:
            for example, no order of keys. The first has that of its ranks, the second sorts by dtype.
        is_mixed: whether one part is a distributed checkpoint and the other one a file.
        uncompared: paths of objects that may differ, because one part stores too little of them.
        opaque: paths of options and state that are objects of some class and cannot be compared.
    """

    def __init__(self, ours: OpenPart, theirs: OpenPart, rekeyed: Sequence[RekeyedOptimizer]) -> None:
        """Prepare the comparison with the part that it should equal; optimizers in ``rekeyed`` have other keys."""
        self._ours, self._theirs = ours, theirs
        own = {id(optimizer) for optimizer in ours.inventory.optimizers}
        self._rekeyed = [optimizer for optimizer in rekeyed if id(optimizer.one) in own]
        #: Optimizers compared parameter by parameter. If the parameters cannot be matched, they are compared as stored.
        self._wheres = {ours.own_name(optimizer.one.where) for optimizer in self._rekeyed if optimizer.keys}
        self.keeps_less = any(
            part.is_distributed or facts_of(part.inventory.container).is_table for part in (ours, theirs)
        )
        self.is_mixed = ours.is_distributed != theirs.is_distributed
        self.uncompared: list[str] = []
        self.opaque: list[str] = []

    @property
    def notes(self) -> Iterator[str]:
        """Notes on objects that were not compared, or not compared as stored."""
        for optimizer in self._rekeyed:
            where = optimizer.one.where or "the optimizer"
            how = "compared parameter by parameter" if optimizer.keys else "its parameters could not be matched"
            if optimizer.is_reordered:
                yield f"{where} lists its parameters in another order on the other side: compared by name"
            else:
                yield f"{where} has different keys on the other side: {how}"
        if self.uncompared:
            yield f"{some(self.uncompared)} not compared: stored differently in a distributed checkpoint"
        if self.opaque:
            yield f"{some(self.opaque)} not compared: not a plain value"

    def is_apart(self, path: str, key: str) -> bool:
        """Whether a key of the dict at a path in the part is compared parameter by parameter."""
        return path in self._wheres and key.partition(".")[0] in _PARTS

    def kept_changes(self, sites: tuple[Collection[int], Collection[int]] = ((), ())) -> Iterator[TreeChange]:
        """Differences between the parts, in objects that a distributed checkpoint stores.

        ``sites`` are starts of operations, in each pickle, whose values may differ because they follow the device.
        """
        trees = self._ours.tree(), self._theirs.tree()
        for change in kept_changes(*trees, TensorNodes(), sites=sites, is_apart=self.is_apart):
            if self.is_mixed and (change.may_be_kept or UNREAD in {change.ours, change.theirs}):
                self.uncompared.append(change.path)
            else:
                yield change

    def rekeyed_changes(self, *, flags_count: bool) -> Iterator[TreeChange]:
        """Differences in options and other non-tensor state between optimizers, matched by parameter."""
        for optimizer in self._rekeyed:
            for path, mine, theirs in optimizer.changes(flags_count=flags_count):
                if OPAQUE in (mine, theirs) and ABSENT not in (mine, theirs):
                    self.opaque.append(path)
                else:
                    yield TreeChange(self._ours.own_name(path), repr(mine), repr(theirs))
