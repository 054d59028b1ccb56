"""List the entries of a checkpoint: the members of its dicts, lists and tuples, with the paths and roles of inspect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.shapes import as_dict, key_text, unique
from ckptmove.pickles.tree import Call, Dict, Node, Persistent, PlainTensor, Sequence, Tuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.model import Inventory, Role
    from ckptmove.pickles.tree import Value

#: Nodes of tensors and storages.
_TENSORS: Final = frozenset({Call, Persistent, PlainTensor})


class StoredMember(NamedTuple):
    """A member of a dict, a list or a tuple; or the root."""

    prefix: str  # path of its holder with a dot at the end; empty below the root
    key: Value  # key in the dict, or index in the list; empty for the root
    holder: Dict | Sequence | None  # the dict or the list; None for the root
    place: int  # index of the value in `holder.flat` or `holder.items`
    value: Value
    role: Role | None  # role of the tensor, or of the part; None for a container or an object without one
    parent: int  # index of the entry of the holder; -1 for the root
    #: index of the entry at which the same container was reached first, whose members are not listed again; -1 for
    #: every other entry.
    same: int
    is_tensor: bool  # whether the inventory lists it as a tensor

    @property
    def path(self) -> str:
        """Path from the root."""
        return self.prefix + key_text(self.key)


def entries(root: Value, inventory: Inventory, base: str = "") -> list[StoredMember]:
    """List the root and all entries below it; each container is entered once, and no pickled object is.

    A dict in which a key is repeated loses the earlier values, and a dict that is made of a list of pairs (Python 2)
    becomes one whose items are set, so that an edit of ``StoredMember.holder`` is an edit of the tree.

    Args:
        root: the root, or the value at ``base`` that has become the root.
        base: path of ``root`` in the inventory.

    Returns:
        The entries in the order of their depth: an entry comes after the entry of its holder.
    """
    lookup = _Roles(inventory, base)
    found = [StoredMember("", "", None, -1, root, lookup.of_root(), -1, -1, lookup.is_tensor("", root))]
    first = {id(root): 0}
    for index, entry in enumerate(found):  # the list grows
        value = entry.value
        holder = value if isinstance(value, Sequence) else pairs_of(value)
        if holder is None or entry.same != -1:
            continue
        prefix = f"{entry.path}." if index else ""
        for key, place, value in _members(holder):
            path = prefix + key_text(key)
            is_tensor, same = lookup.is_tensor(path, value), -1
            if _size(value) and first.setdefault(id(value), len(found)) != len(found):
                same = first[id(value)]
            role = lookup.role(path, value, entry.role, is_tensor=is_tensor)
            found.append(StoredMember(prefix, key, holder, place, value, role, index, same, is_tensor))
    return found


def pairs_of(value: Value) -> Dict | None:
    """Return the pairs of a dict or a dict subclass, each key once; an edit of them is an edit of the value.

    Returns None for any other value.
    """
    pairs = as_dict(value)
    if pairs is None:
        return None
    if type(value) is Call and value.assigned is None and pairs.flat and pairs not in getattr(value.args, "items", ()):
        value.args, value.assigned = Tuple((), ()), pairs
    triples = list(unique(pairs))
    if len(triples) * 2 < len(pairs.flat):
        pairs.flat[:] = [item for key, one, _ in triples for item in (key, one)]
        pairs.starts[:] = [start for *_, start in triples for start in (-1, start)]
    return pairs


def _size(value: Value) -> int | None:
    """Return the number of members of a container; None for any other value."""
    if isinstance(value, Sequence):
        return len(value.items)
    pairs = as_dict(value)
    return None if pairs is None else len(pairs.flat)


def _members(holder: Dict | Sequence) -> Iterator[tuple[Value, int, Value]]:
    """Iterate over key, place and value of the members."""
    if isinstance(holder, Sequence):
        yield from ((place, place, value) for place, value in enumerate(holder.items))
    else:
        flat = holder.flat
        yield from ((flat[place - 1], place, flat[place]) for place in range(1, len(flat), 2))


class _Roles:
    """The roles of entries, from an inventory."""

    def __init__(self, inventory: Inventory, base: str) -> None:
        self._base = base
        self._prefix = f"{base}." if base else ""
        self._sections = dict(inventory.sections)
        self._tensors = {tensor.name: tensor.role for tensor in inventory.tensors}

    def of_root(self) -> Role | None:
        path = self._base
        while path and path not in self._sections:
            path = path.rpartition(".")[0]
        return self._tensors.get(self._base) or self._sections.get(path)

    def is_tensor(self, path: str, value: Value) -> bool:
        return type(value) in _TENSORS and (self._prefix + path if path else self._base) in self._tensors

    def role(self, path: str, value: Value, outer: Role | None, *, is_tensor: bool) -> Role | None:
        name = self._prefix + path
        if is_tensor:
            return self._tensors[name]
        role = self._sections.get(name, outer)
        can_hold_tensors = isinstance(value, Node) and _size(value) != 0
        return role if role is not None or can_hold_tensors else "other"
