"""Compare the trees of two pickles, except for devices and the content of storages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.shapes import as_dict, key_text
from ckptmove.checkpoint.inventory.tensor_nodes import DENSE_REBUILDS, named_items
from ckptmove.pickles.storage_id import storage_id
from ckptmove.pickles.tree import Call, Dict, Global, List, Node, Opaque, Persistent, Sequence, Tuple
from ckptmove.torch_facts.devices import is_device_string

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from ckptmove.checkpoint.inventory.tensor_nodes import TensorNode, TensorNodes
    from ckptmove.pickles.tree import Value

    Pair = tuple[str, Value, int, Value, int]
    Sites = Collection[int]
    _Key = tuple[str, str]

_SHOWN: Final = 60
_MISSING: Final = Opaque("nothing")


class TreeChange(NamedTuple):
    """One difference between two trees."""

    #: path from the root, parts joined by dots; ``the length of``, ``the order in`` or ``the type of the key``
    #: precedes it if only that differs.
    path: str
    ours: str  # text of the value in our tree
    theirs: str  # text of the value in the other tree
    is_lone_tensor: bool = False  # whether one value is a tensor and the other is absent
    may_be_kept: bool = False  # whether one value is an object and the other a dict or a list, maybe its saved form

    def __str__(self) -> str:
        return f"{self.path} is {self.ours} in place of {self.theirs}"


def tree_changes(
    ours: Value,
    our_sites: Collection[int],
    theirs: Value,
    their_sites: Collection[int],
    root: str = "",
    tensors: TensorNodes | None = None,
    is_apart: Callable[[str, str], bool] = lambda _path, _key: False,
) -> Iterator[TreeChange]:
    """Iterate over the differences between two trees, in no particular order.

    Args:
        our_sites: starts, in our pickle, of values that name a device or depend on one; these values may differ.
        their_sites: the same starts in the pickle of the expected tree.
        tensors: recognizes tensors, if their records are compared elsewhere. Then only the parts of a tensor that are
            not in its record are compared here, and the content of dicts and lists that only one tree has.
        is_apart: whether the value of a key in the dict at a path is compared elsewhere.
    """
    stack: list[Pair] = [(root, ours, -1, theirs, -1)]
    # With the nodes, which keeps them alive: a node made here must not reuse the id of an earlier one.
    seen: dict[tuple[int, int], tuple[Value, Value]] = {}
    while stack:
        path, mine, my_start, other, other_start = stack.pop()
        if (my_start in our_sites or other_start in their_sites) and _may_differ(mine, other):
            continue
        if (id(mine), id(other)) in seen:
            continue  # before its members are paired: a list may contain itself many times
        inner = None if tensors is None else _of_tensors(path, mine, other, tensors)
        if inner is None and _MISSING not in (mine, other) and isinstance(mine, Node) and type(mine) is type(other):
            inner = _member_pairs(path, mine, other)
        if inner is None:
            if not _is_same(mine, other):
                lone = other if mine is _MISSING else mine if other is _MISSING else None
                is_tensor = tensors is not None and tensors.is_tensor(lone)
                yield TreeChange(path or "the root", _shown(mine), _shown(other), is_tensor)
        else:
            seen[id(mine), id(other)] = (mine, other)
            stack += (pair for pair in inner if not is_apart(path, pair[0][len(path) + bool(path) :]))


def kept_changes(
    ours: Value,
    theirs: Value,
    tensors: TensorNodes,
    *,
    sites: tuple[Sites, Sites] = ((), ()),
    root: str = "",
    is_apart: Callable[[str, str], bool] = lambda _path, _key: False,
) -> Iterator[TreeChange]:
    """Compare only those parts of two trees that a distributed checkpoint keeps, without tensors.

    From torch/distributed/checkpoint/_traverse.py: it drops the classes of dicts, the types of their keys, and empty
    dicts; of lists with dicts or tensors it keeps only the items. The arguments are those of :func:`tree_changes`.
    """
    stack: list[Pair] = [(root, ours, -1, theirs, -1)]
    seen: dict[tuple[int, int], tuple[Value, Value]] = {}
    while stack:
        path, mine, my_start, other, other_start = stack.pop()
        is_tensor = tensors.is_tensor(mine) or tensors.is_tensor(other)
        if is_tensor or (id(mine), id(other)) in seen:
            continue
        if (my_start in sites[0] or other_start in sites[1]) and _may_differ(mine, other):
            continue
        one, two = _kept_members(mine), _kept_members(other)
        has_members = one is not None and two is not None
        if has_members or (_MISSING in (mine, other) and one is not two):
            seen[id(mine), id(other)] = (mine, other)
            one, two = one or {}, two or {}
            for key in (*two, *(key for key in one if key not in two)):
                if not is_apart(path, key):
                    sides = *one.get(key, (_MISSING, -1)), *two.get(key, (_MISSING, -1))
                    stack.append((_join(path, key), *sides))
        elif _MISSING in (mine, other):
            yield TreeChange(path, _shown(mine), _shown(other))
        elif one is two:
            yield from tree_changes(mine, sites[0], other, sites[1], path)
        else:
            is_object = type(mine) is Call or type(other) is Call
            yield TreeChange(path or "the root", _shown(mine), _shown(other), may_be_kept=is_object)


def _kept_members(value: Value) -> dict[str, tuple[Value, int]] | None:
    """Return the members of a dict or a list by the text of their keys; None for other values, which stay whole."""
    if type(value) is List:
        return {str(at): member for at, member in enumerate(zip(value.items, value.starts, strict=True))}
    pairs = as_dict(value)
    return None if pairs is None else {key_text(key): (one, start) for key, one, start in pairs.pairs()}


def _of_tensors(path: str, mine: Value, other: Value, tensors: TensorNodes) -> Iterable[Pair] | None:
    """Pair the parts of two tensors that are not in their records, or the members of a container on one side only."""
    if mine is _MISSING and tensors.hold(other):
        return ((_join(path, key), _MISSING, -1, value, -1) for key, value in named_items(other))
    if other is _MISSING and tensors.hold(mine):
        return ((_join(path, key), value, -1, _MISSING, -1) for key, value in named_items(mine))
    ours, theirs = tensors.node(mine), tensors.node(other)
    return None if ours is None or theirs is None else _tensor(path, ours, theirs)


def _tensor(path: str, mine: TensorNode, other: TensorNode) -> list[Pair]:
    """Pair the parts of two tensors that are not in their records."""
    if mine.kind != other.kind:
        return []
    keys = dict.fromkeys((*mine.rest, *other.rest))
    found: list[Pair] = []
    for key in keys:
        label, lacking = key[0], _MISSING if key[0] else Dict([], [])
        place = _join(path, label) if label else path
        found.append((place, mine.rest.get(key, lacking), -1, other.rest.get(key, lacking), -1))
    return found


def _member_pairs(path: str, mine: Node, other: Value) -> list[Pair]:
    """Pair the members of two nodes of one type."""
    if isinstance(mine, Sequence) and isinstance(other, Sequence):
        return _items(path, mine, other)
    if isinstance(mine, Dict) and isinstance(other, Dict):
        return _pairs(path, mine, other)
    if isinstance(mine, Call) and isinstance(other, Call):
        return _call(path, mine, other)
    if isinstance(mine, Persistent) and isinstance(other, Persistent):
        return [] if storage_id(mine) is not None else [(path, mine.pid, mine.pid_start, other.pid, other.pid_start)]
    return [(path, _name(mine), -1, _name(other), -1)]


def _items(path: str, mine: Sequence, other: Sequence) -> list[Pair]:
    if len(mine.items) != len(other.items):
        return [(f"the length of {path or 'the root'}", len(mine.items), -1, len(other.items), -1)]
    both = zip(mine.items, mine.starts, other.items, other.starts, strict=True)
    return [(_join(path, str(index)), *sides) for index, sides in enumerate(both)]


def _pairs(path: str, mine: Dict, other: Dict) -> list[Pair]:
    found: list[Pair] = []
    ours, theirs = _by_key(mine), _by_key(other)
    if ours.keys() == theirs.keys() and list(ours) != list(theirs):
        orders = (", ".join(key for _, key in one) for one in (ours, theirs))
        found.append((f"the order in {path or 'the root'}", next(orders), -1, next(orders), -1))
    for key, match in _mistyped(ours, theirs):
        place = _join(path, key[1])
        found += (f"the type of the key {place}", key[0], -1, match[0], -1), (place, *ours.pop(key), *theirs.pop(match))
    for key in (*theirs, *(key for key in ours if key not in theirs)):
        one, two = ours.get(key, (_MISSING, -1)), theirs.get(key, (_MISSING, -1))
        found.append((_join(path, key[1]), *one, *two))
    return found


def _mistyped(ours: Collection[_Key], theirs: Collection[_Key]) -> list[tuple[_Key, _Key]]:
    """Pair keys that have the same text but another type in the other dict: ``0`` and ``"0"``."""
    lone = {key[1]: key for key in ours if key not in theirs and key[0].isalpha()}
    matches = [key for key in theirs if key not in ours and key[0].isalpha() and key[1] in lone]
    return [(lone.pop(match[1]), match) for match in matches if match[1] in lone]


def _by_key(pairs: Dict) -> dict[_Key, tuple[Value, int]]:
    """Return the values by the type and the text of their keys; keys that are objects also count by their position."""
    found: dict[_Key, tuple[Value, int]] = {}
    for index, (key, value, start) in enumerate(pairs.pairs()):
        place = str(index) if isinstance(key, Node) and not isinstance(key, Tuple) else ""
        found[type(key).__name__ + place, key_text(key)] = (value, start)
    return found


def _call(path: str, mine: Call, other: Call) -> list[Pair]:
    attributes = path if type(mine.state) is type(other.state) else f"the attributes of {path or 'the root'}"
    found: list[Pair] = [
        (path, mine.func, -1, other.func, -1),
        (_join(path, "kwargs"), mine.kwargs, -1, other.kwargs, -1),
        (attributes, mine.state, mine.state_start, other.state, other.state_start),
        (path, mine.appended, -1, other.appended, -1),
        (path, mine.assigned, -1, other.assigned, -1),
    ]
    ours, theirs = mine.args, other.args
    # Storages and offsets may differ: only the sharing differs then.
    if mine.name in DENSE_REBUILDS and type(ours) is Tuple and type(theirs) is Tuple:
        ours, theirs = (Tuple(one.items[2:], one.starts[2:]) for one in (ours, theirs))
    return [*found, (path, ours, mine.args_start, theirs, other.args_start)]


def _may_differ(mine: Value, other: Value) -> bool:
    """Whether both values are devices, or both are flags that depend on the device."""
    if isinstance(mine, str) and isinstance(other, str):
        return is_device_string(mine) and is_device_string(other)
    flags = (True, False, None)
    return type(mine) is type(other) is Tuple or (mine in flags and other in flags)


def _is_same(mine: Value, other: Value) -> bool:
    if type(mine) is not type(other):
        return False
    if isinstance(mine, float) and isinstance(other, float):
        # Here NaN equals NaN, and -0.0 differs from 0.0.
        return repr(mine) == repr(other)
    return mine == other


def _name(node: Value) -> str:
    return node.full_name if isinstance(node, Global) else getattr(node, "description", "")


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _shown(value: Value) -> str:
    if value is _MISSING:
        return "absent"
    if type(value) is Opaque:
        return value.description
    if isinstance(value, Node):
        return f"a {type(value).__name__.lower()}" if not isinstance(value, Call) else f"a {value.name or 'call'}"
    text = key_text(value) if isinstance(value, int) and not isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
