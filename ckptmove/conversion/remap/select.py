"""Remove parts of a checkpoint from its tree: ``--as-root``, ``--only`` and ``--drop``."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from fnmatch import translate
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Final, cast, get_args

from ckptmove.checkpoint.entries import entries
from ckptmove.checkpoint.inventory.flattened import FLAT_KEYS
from ckptmove.checkpoint.inventory.objects import module_attributes
from ckptmove.checkpoint.inventory.shapes import key_text
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.conversion.remap.errors import (
    InsideObject,
    ListItems,
    NeededByOptimizer,
    NoMatch,
    NothingLeft,
    SharedPart,
)
from ckptmove.model import Role
from ckptmove.moves import Dropped
from ckptmove.pickles.tree import Call, Node, Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Inventory
    from ckptmove.moves import Remap
    from ckptmove.pickles.tree import Dict, Value

_ROLES: Final[frozenset[str]] = frozenset(get_args(Role))
#: Roles of parts that consist of tensors.
_OF_TENSORS: Final = frozenset({"model", "ema", "criterion"})
#: Names that an error shows, and names that a mistyped one is compared with.
_SHOWN: Final = 4
_MOST_NAMES: Final = 1000
_LONGEST: Final = 200


def select(root: Value, inventory: Inventory, remap: Remap) -> tuple[Value, tuple[Dropped, ...]]:
    """Change the root of a tree, then remove entries from its dicts in place.

    ``--only`` and ``--drop`` take the name of a role, or a glob of a whole path below the new root. The name of a role
    always means the role, also if a key has this name. An entry that matches is kept or removed with everything in it,
    and a dict or a list whose entries are all removed is removed too. Values in a dict without a role have the role
    ``other`` unless they hold tensors of another role.

    Returns:
        The new root, and the removed parts by their paths in ``inventory``.
    """
    dropped: tuple[Dropped, ...] = ()
    if remap.as_root:
        whole = _Selection(root, inventory, "")
        chosen = whole.find(remap.as_root)
        whole.keep([index == chosen for index in range(len(whole.entries))], "as-root")
        root, dropped = whole.entries[chosen].value, whole.dropped()
    if not remap.only and not remap.drop:
        return root, dropped
    parts = _Selection(root, inventory, remap.as_root)
    only = parts.matching("--only", remap.only)
    drop = parts.matching("--drop", remap.drop)
    if remap.only:
        parts.keep(only, "only")
    parts.drop(drop)
    parts.check()
    parts.remove()
    return root, dropped + parts.dropped()


class _Selection:
    """The entries of a tree, each after the entry of its holder, and those that are removed."""

    def __init__(self, root: Value, inventory: Inventory, base: str) -> None:
        self.entries = entries(root, inventory, base)
        self._inventory = inventory
        self._base = base
        self._tensors = [(path, one) for one in inventory.tensors if (path := self._below(one.name))]
        sections = [(path, role) for where, role in inventory.sections if (path := self._below(where))]
        #: Tensors, then sections that need no tensors.
        self._named: list[tuple[str, Role]] = [(path, one.role) for path, one in self._tensors]
        self._named += (section for section in sections if section[1] not in _OF_TENSORS)
        self._owners = self._find_owners()
        self._roles = self._find_roles()
        #: Why each entry is removed; empty for one that stays.
        self._reasons = [""] * len(self.entries)
        #: For each entry, one that is removed below it; 0 without any.
        self._lost = [0] * len(self.entries)

    def _below(self, name: str) -> str | None:
        """Return the path from the root of a name in the inventory; None if it is elsewhere."""
        if not self._base or name == self._base:
            return name[len(self._base) :]
        return name[len(self._base) + 1 :] if name.startswith(f"{self._base}.") else None

    def _find_owners(self) -> list[int]:
        """Return the entry with the longest path that each name begins with; 0 for the root."""
        marks = [(f"{one.path}.", 0, at) for at, one in enumerate(self.entries) if at and isinstance(one.value, Node)]
        marks += ((f"{path}.", 1, at) for at, (path, _) in enumerate(self._named))
        owners, around = [0] * len(self._named), [("", 0)]
        for text, is_name, at in sorted(marks):
            while not text.startswith(around[-1][0]):
                around.pop()
            if is_name:
                owners[at] = around[-1][1]
            else:
                around.append((text, at))
        return owners

    def _find_roles(self) -> list[Role | None]:
        """Return the roles of all entries.

        An object without a role has that of everything in it. The key alone does not make ``model_args`` a model.
        """
        inside: dict[int, set[Role]] = {}
        for (_, role), owner in zip(self._named, self._owners, strict=True):
            inside.setdefault(owner, set()).add(role)
        holders = {entry.parent for entry in self.entries}
        hold_tensors = self._with_holders(self._owners[: len(self._tensors)])
        roles = [entry.role for entry in self.entries]
        for index, entry in enumerate(self.entries):
            found: set[Role] = inside.get(index, {"other"})
            if entry.role is None and index not in holders and len(found) == 1:
                (roles[index],) = found
            if roles[index] in _OF_TENSORS and index not in hold_tensors and not _is_module(entry.value):
                is_inside = index > 0 and roles[entry.parent] == roles[index]
                roles[index] = roles[index] if is_inside else "other"
        return roles

    def _with_holders(self, owners: Iterable[int]) -> set[int]:
        """Return entries, and the entries around them."""
        found: set[int] = set()
        for owner in owners:
            index = owner
            while index >= 0 and index not in found:
                found.add(index)
                index = self.entries[index].parent
        return found

    def find(self, path: str) -> int:
        """Return the entry of ``--as-root``; of several with this path the one with the longest keys."""
        for index, entry in enumerate(self.entries):
            if index and isinstance(entry.value, Node) and entry.path == path:
                return index
        for (name, _), owner in zip(self._named, self._owners, strict=True):
            where = self.entries[owner].path
            if f"{name}.".startswith(f"{path}.") and len(where) < len(path):
                raise InsideObject("--as-root", path, where)
        raise NoMatch("--as-root", path, self._similar(path, is_root=True))

    def matching(self, option: str, words: Iterable[str]) -> list[bool]:
        """Return whether each entry matches one of the words.

        A container matches a role without the members that have another one: the optimizer in a state_dict.
        """
        covered, within = [False] * len(self.entries), [False] * len(self._named)
        for word in words:
            test = _test(word)
            hits = [test(entry.path, role) for entry, role in zip(self.entries, self._roles, strict=True)]
            inner = [test(*named) for named in self._named]
            if not any(hits) and not any(inner):
                raise NoMatch(option, word, self._similar(word))
            chosen = self._of_role(hits) if word in _ROLES else self._with_members(hits)
            covered = [one or hit for one, hit in zip(covered, chosen, strict=True)]
            within = [one or hit for one, hit in zip(within, inner, strict=True)]
        for (path, _), hit, owner in zip(self._named, within, self._owners, strict=True):
            if hit and not covered[owner]:
                entry = self.entries[owner]
                if entry.same != -1:
                    raise SharedPart(self.entries[entry.same].path, entry.path)
                raise InsideObject(option, path, entry.path)
        return covered

    def _of_role(self, own: list[bool]) -> list[bool]:
        """Return the entries of a role and those below one, except members of another role and what holds them."""
        found = [*own]
        for index, entry in enumerate(self.entries):
            has_own = self._roles[index] not in {None, "other"}
            found[index] = own[index] or (index > 0 and found[entry.parent] and not has_own)
        for index in range(len(found) - 1, 0, -1):
            found[self.entries[index].parent] &= found[index]
        return found

    def _with_members(self, own: list[bool]) -> list[bool]:
        """Return the entries that are chosen or below a chosen one."""
        for index, entry in enumerate(self.entries):
            own[index] = own[index] or (index > 0 and own[entry.parent])
        return own

    def keep(self, own: list[bool], reason: str) -> None:
        """Remove every entry that is neither one of these, nor below one, nor around one."""
        stays = self._with_members(own)
        for index in range(len(stays) - 1, 0, -1):
            if stays[index]:
                stays[self.entries[index].parent] = True
        self._reasons = ["" if stay else reason for stay in stays]

    def drop(self, own: list[bool]) -> None:
        """Remove these entries, and containers from which everything is removed."""
        reasons, stays = self._reasons, [False] * len(own)
        for index in range(len(own) - 1, -1, -1):
            lost = self._lost[index]
            if own[index] or (lost and not stays[index]):
                reasons[index] = reasons[index] or ("drop" if own[index] else reasons[lost])
            parent = self.entries[index].parent
            if parent >= 0:
                self._lost[parent] = index if reasons[index] else lost or self._lost[parent]
                stays[parent] = stays[parent] or not reasons[index]
        if reasons[0]:
            raise NothingLeft

    def check(self) -> None:
        """Refuse a removal that damages what stays."""
        reasons = self._reasons
        for index, entry in enumerate(self.entries):
            if reasons[index] and not reasons[entry.parent] and isinstance(entry.holder, Sequence):
                raise ListItems(self.entries[entry.parent].path)
            if not reasons[index] and entry.same != -1 and self._lost[entry.same] and not reasons[entry.same]:
                raise SharedPart(self.entries[entry.same].path, entry.path)
        containers: dict[str, int] = {}
        for index, entry in enumerate(self.entries):
            containers.setdefault(entry.path, index)
        staying: dict[int, int] = {}
        for number, optimizer in enumerate(self._inventory.optimizers):
            path = self._below(optimizer.where)
            index = -1 if path is None else containers.get(path, -1)
            if index >= 0 and not reasons[index]:
                staying[index] = number
        members: dict[int, list[int]] = {index: [] for index in staying}
        for index, entry in enumerate(self.entries):
            if entry.parent in members:
                members[entry.parent].append(index)
        for index, number in staying.items():
            self._check_optimizer(number, members[index])

    def _check_optimizer(self, number: int, members: list[int]) -> None:
        """Refuse to remove a part of an optimizer, or a part of the parameters of one that stays."""
        optimizer, reasons = self._inventory.optimizers[number], self._reasons
        if optimizer.is_flat:
            members = [index for index in members if key_text(self.entries[index].key).startswith(FLAT_KEYS)]
        removed = [index if reasons[index] else self._lost[index] for index in members]
        lost = [index for index in removed if index]
        if lost and not all(reasons[index] for index in members):
            raise NeededByOptimizer(optimizer.where, self.entries[lost[0]].path, len(lost) - 1)
        if lost or not self._removed_tensors:
            return
        matched = (tensor.name for _, tensor in self._pairings[number].matches if tensor is not None)
        covered = [path for name in matched if (path := self._below(name))]
        gone = [path for path in covered if path in self._removed_tensors]
        if gone and len(gone) < len(covered):
            raise NeededByOptimizer(optimizer.where, gone[0], len(gone) - 1)

    @cached_property
    def _pairings(self) -> tuple[Pairing, ...]:
        return pair_all(self._inventory)

    @cached_property
    def _removed_tensors(self) -> frozenset[str]:
        owned = zip(self._tensors, self._owners, strict=False)  # the owners of sections follow
        return frozenset([path for (path, _), owner in owned if self._reasons[owner]])

    def remove(self) -> None:
        """Remove the entries from their dicts, each as a whole."""
        places: dict[int, set[int]] = {}
        holders: dict[int, Dict] = {}
        for entry, reason in zip(self.entries, self._reasons, strict=True):
            if reason and not self._reasons[entry.parent]:
                holder = cast("Dict", entry.holder)
                holders[id(holder)] = holder
                places.setdefault(id(holder), set()).add(entry.place)
        for identity, holder in holders.items():
            gone = places[identity]
            holder.flat[:] = [item for at, item in enumerate(holder.flat) if at | 1 not in gone]
            holder.starts = [start for at, start in enumerate(holder.starts) if at | 1 not in gone]

    def dropped(self) -> tuple[Dropped, ...]:
        """Return the removed entries, each as a whole, with the tensors in them."""
        tops: list[int] = []
        for index, (entry, reason) in enumerate(zip(self.entries, self._reasons, strict=True)):
            tops.append((tops[entry.parent] if self._reasons[entry.parent] else index) if reason else 0)
        sizes = {storage.key: storage.nbytes for storage in self._inventory.storages}
        counts, viewed = Counter[int](), Counter[tuple[int, str | None]]()
        for (_, tensor), owner in zip(self._tensors, self._owners, strict=False):
            counts[tops[owner]] += 1
            for part in tensor.dense():
                viewed[tops[owner], part.storage] += part.nbytes
        nbytes = Counter[int]()
        for (top, storage), size in viewed.items():
            nbytes[top] += size if storage is None else min(size, sizes[storage])  # tied tensors count once
        prefix = f"{self._base}." if self._base else ""
        return tuple(
            Dropped(prefix + self.entries[index].path, counts[index], nbytes[index], self._reasons[index])
            for index in dict.fromkeys(tops)
            if index
        )

    def _similar(self, word: str, *, is_root: bool = False) -> tuple[str, ...]:
        """Return roles and paths that are similar to a word, or else the keys of the root."""
        listed = [one for one in islice(self.entries, 1, _MOST_NAMES) if isinstance(one.value, Node) or not is_root]
        roles = () if is_root else sorted({role for role in self._roles if role is not None})
        short = (path for entry in listed if len(path := entry.path) <= _LONGEST)
        near = difflib.get_close_matches(word[:_LONGEST], dict.fromkeys((*roles, *short)), n=_SHOWN)
        return tuple(near or islice((entry.path for entry in listed if not entry.parent), _SHOWN))


def _is_module(value: Value) -> bool:
    return type(value) is Call and module_attributes(value) is not None


def _test(word: str) -> Callable[[str, Role | None], bool]:
    """Return a function that tells whether the path or the role of an entry matches a word."""
    if word in _ROLES:
        return lambda _path, role: role == word
    match = re.compile(translate(word)).match
    return lambda path, _role: match(path) is not None
