from __future__ import annotations

import importlib
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import TYPE_CHECKING, Any

import pytest

from ckptmove.pickles.tree import ByteArray, Call, Dict, FrozenSet, Global, List, Node, Python2Str, Sequence, Set, Tuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.pickles.tree import Value

_ATOMS = {Python2Str: str.__str__, ByteArray: bytearray}
_MODULES = frozenset({"builtins", "collections", "copyreg", "_codecs", "functools"})


class Evaluator:
    """Builds the object of an inert tree, which ckptmove itself must never do."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}

    def value(self, node: Value) -> Any:
        if not isinstance(node, Node):
            return _ATOMS.get(type(node), lambda atom: atom)(node)
        if id(node) not in self._done:
            self._make(node)
        return self._done[id(node)]

    def _make(self, node: Node) -> None:
        if isinstance(node, Global):
            self._done[id(node)] = _resolve(node)
        elif isinstance(node, List):
            self._fill(self._keep(node, []), node, None)
        elif isinstance(node, Dict):
            self._fill(self._keep(node, {}), None, node)
        elif isinstance(node, Sequence):
            made = {Set: set, FrozenSet: frozenset, Tuple: tuple}[type(node)](map(self.value, node.items))
            # A cycle through the items has created this value already.
            self._done.setdefault(id(node), made)
        else:
            assert isinstance(node, Call)
            self._call(node)

    def _keep(self, node: Node, made: Any) -> Any:
        self._done[id(node)] = made
        return made

    def _call(self, node: Call) -> None:
        func, kwargs = self.value(node.func), self.value(node.kwargs) or {}
        made = func(*self.value(node.args), **kwargs)
        if id(node) in self._done:
            return
        self._keep(node, made)
        self._fill(made, node.appended, node.assigned)
        if node.state_start >= 0:
            _build(made, self.value(node.state))

    def _fill(self, made: Any, appended: List | None, assigned: Dict | None) -> None:
        for item in appended.items if appended else ():
            made.append(self.value(item))
        for key, item, _ in assigned.pairs() if assigned else ():
            made[self.value(key)] = self.value(item)


def _resolve(node: Global) -> Any:
    module, name = NAME_MAPPING.get((node.module, node.name), (node.module, node.name))
    module = IMPORT_MAPPING.get(module, module)
    if module not in _MODULES and not module.endswith("object_graphs"):
        raise AssertionError(node.full_name)
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _build(made: Any, state: Any) -> None:
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    slots = {}
    if type(state) is tuple and len(state) == 2:
        state, slots = state
    if state:
        made.__dict__.update(state)
    for name, value in slots.items():
        setattr(made, name, value)


class _Comparison:
    """Equality by type, value, identity and cycles."""

    def __init__(self) -> None:
        self._partner: dict[int, int] = {}
        self._back: dict[int, int] = {}

    def same(self, left: Any, right: Any) -> bool:
        if type(left) is not type(right):
            return False
        if isinstance(left, (set, frozenset, bytes, bytearray)):
            return bool(left == right)
        if isinstance(left, (str, int, float, complex, type(None), type)) or callable(left):
            return repr(left) == repr(right)
        if id(left) in self._partner or id(right) in self._back:
            return self._partner.get(id(left)) == id(right)
        if type(left) is not tuple:
            self._partner[id(left)] = id(right)
            self._back[id(right)] = id(left)
        return self._members(left, right)

    def _members(self, left: Any, right: Any) -> bool:
        for kind, members in ((dict, dict.items), ((list, tuple), list)):
            if isinstance(left, kind):
                mine, theirs = list(members(left)), list(members(right))
                if len(mine) != len(theirs) or not all(map(self.same, mine, theirs)):
                    return False
        if hasattr(left, "maxlen"):
            return left.maxlen == right.maxlen and len(left) == len(right) and all(map(self.same, left, right))
        slots = [(getattr(left, name, None), getattr(right, name, None)) for name in getattr(left, "__slots__", ())]
        return self.same(getattr(left, "__dict__", None), getattr(right, "__dict__", None)) and all(
            self.same(mine, theirs) for mine, theirs in slots
        )


@pytest.fixture(scope="session")
def evaluate() -> Callable[[Value], Any]:
    return lambda node: Evaluator().value(node)


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], bool]:
    return lambda left, right: _Comparison().same(left, right)


@pytest.fixture(scope="session")
def nodes() -> Callable[[Value], list[tuple[Value, int]]]:
    """Every value in a tree with its start; members of a node once. The start of the root is -1."""

    def members(node: Value) -> list[tuple[Value, int]]:
        if isinstance(node, Sequence):
            return list(zip(node.items, node.starts, strict=True))
        if isinstance(node, Dict):
            return list(zip(node.flat, node.starts, strict=True))
        if isinstance(node, Call):
            inner = [*members(node.appended), *members(node.assigned), (node.args, node.args_start)]
            return [*inner, (node.state, node.state_start)] if node.state_start >= 0 else inner
        return []

    def walk(root: Value) -> list[tuple[Value, int]]:
        found, todo, seen = [], [(root, -1)], set()
        while todo:
            value, start = todo.pop()
            found.append((value, start))
            if isinstance(value, Node) and id(value) not in seen:
                seen.add(id(value))
                todo += members(value)
        return found

    return walk
