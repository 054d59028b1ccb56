"""Tell whether two trees differ only in what a conversion to another device changes.

``diff`` asks whether two checkpoints mean the same. Here the trees must be the same, node by node, also where they mean
nothing: that is what makes it safe to put the bytes of one in the place of the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.shapes import key_text
from ckptmove.comparison.other_content import device_sites
from ckptmove.pickles.rebuild_arguments import device_text
from ckptmove.pickles.tree import Call, Dict, Global, Node, Opaque, Persistent, Python2Str, Sequence
from ckptmove.torch_facts.devices import is_device_string

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckptmove.model import Inventory
    from ckptmove.pickles.tree import Value

#: Start of a value that no conversion changes.
_FIXED: Final = -1


class Side(NamedTuple):
    """One of two trees."""

    root: Value
    tags: Collection[int]  # starts of the operations that push the location tags of its storages
    devices: Collection[int]  # starts of those that push a tag, another device or a flag that follows the device

    @classmethod
    def of(cls, root: Value, inventory: Inventory) -> Side:
        """The tree of a file with its inventory."""
        tags = frozenset(site for storage in inventory.storages for site in storage.tag_sites)
        return cls(root, tags, device_sites(inventory))


class _Member(NamedTuple):
    """A value in a node: its name there, and its start."""

    name: str
    value: Value
    start: int


def difference(one: Side, other: Side) -> str:
    """The path of a value that differs in more than devices and flags; empty if none does.

    Tags may be any text: only ``torch.load`` reads them. Shared nodes must be shared on both sides.
    """
    stack = [("", _Member("", one.root, _FIXED), _Member("", other.root, _FIXED))]
    partners: tuple[dict[int, Node], dict[int, Node]] = {}, {}
    while stack:
        path, mine, theirs = stack.pop()
        first, second = mine.value, theirs.value
        if not isinstance(first, Node) or not isinstance(second, Node):
            if not (_same_atom(first, second) or _may_differ(mine, theirs, one, other)):
                return path or "the root"
            continue
        known = partners[0].get(id(first)), partners[1].get(id(second))
        if known == (second, first):
            continue
        if known != (None, None) or type(first) is not type(second) or _label(first) != _label(second):
            return path or "the root"
        partners[0][id(first)], partners[1][id(second)] = second, first
        ours, others = [*_members(first)], [*_members(second)]
        if len(ours) != len(others):
            return path or "the root"
        pairs = zip(ours, others, strict=True)
        stack += ((".".join(filter(None, (path, mine.name))), mine, theirs) for mine, theirs in pairs)
    return ""


def _same_atom(first: Value, second: Value) -> bool:
    """Whether two values are the same, NaN and the sign of zero included."""
    if type(first) is not type(second):
        return False
    if isinstance(first, float):
        return repr(first) == repr(second)
    return first == second and (not isinstance(first, Python2Str) or first.raw == second.raw)  # type: ignore[union-attr]  # of one type


def _may_differ(mine: _Member, theirs: _Member, one: Side, other: Side) -> bool:
    """Whether two values are tags, devices, or flags that follow the device."""
    first, second = mine.value, theirs.value
    is_place = mine.start in one.devices or theirs.start in other.devices
    if type(first) is str and type(second) is str:
        is_tag = mine.start in one.tags and theirs.start in other.tags
        return is_tag or (is_place and is_device_string(first) and is_device_string(second))
    return is_place and type(first) is bool and type(second) is bool


def _label(node: Node) -> object:
    """What a node is, apart from its members."""
    if isinstance(node, Global):
        return node.module, node.name
    if isinstance(node, Call):
        return node.opcode
    return node.description if isinstance(node, Opaque) else None


def _members(node: Node) -> Iterator[_Member]:
    if isinstance(node, Sequence):
        numbered = enumerate(zip(node.items, node.starts, strict=True))
        yield from (_Member(str(place), *member) for place, member in numbered)
    elif isinstance(node, Dict):
        for key, value, start in node.pairs():
            yield _Member(key_text(key), key, _FIXED)
            yield _Member(key_text(key), value, start)
    elif isinstance(node, Persistent):
        yield _Member("", node.pid, node.pid_start)
    elif isinstance(node, Call):
        yield _Member("", node.func, _FIXED)
        if not is_device_string(device_text(node) or ""):  # else a device, with or without an index
            yield _Member("", node.args, node.args_start)
        yield _Member("", node.kwargs, _FIXED)
        yield _Member("", node.state, node.state_start)
        yield _Member("", node.appended, _FIXED)
        yield _Member("", node.assigned, _FIXED)
