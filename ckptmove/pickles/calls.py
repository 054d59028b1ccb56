"""The names that a call in a pickle uses: the function that it calls, and functions that this one calls in turn.

A name can be called without standing where the function of a call stands: as an attribute (``getattr``), in a
``functools.partial``, or as an argument of a function that calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.pickles.tree import (
    NEWOBJ,
    NEWOBJ_EX,
    Call,
    Dict,
    Global,
    Node,
    Opaque,
    Persistent,
    Tuple,
    items_of,
    tuple_items,
)
from ckptmove.torch_facts.harmless import is_harmless
from ckptmove.torch_facts.verdicts import COMPUTED, LOOK_UPS, is_dangerous
from ckptmove.torch_facts.weights_only import WEIGHTS_ONLY_SINCE, modern_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.pickles.tree import Value
    from ckptmove.torch_facts.verdicts import Use

_GETATTR: Final = "builtins.getattr"
_TYPE: Final = "builtins.type"
_PARTIAL: Final = "functools.partial"
#: Function of dill that returns a builtin type by its name.
_LOAD_TYPE: Final = "dill._dill._load_type"
#: Functions of numpy that look up a ufunc by module and name.
_UFUNCS: Final = frozenset({"numpy.core._ufunc_reconstruct", "numpy._core._ufunc_reconstruct"})
#: Functions that call their first argument, in any module, with the index of the arguments for it.
_CALL_FIRST: Final = {"_rebuild_from_type": 2, "_rebuild_from_type_v2": 2, "_create_array": 1}
#: Functions that make an object of their first argument, a class, as NEWOBJ does.
_MAKE_FIRST: Final = frozenset({
    "copyreg.__newobj__", "copyreg.__newobj_ex__", "copyreg._reconstructor", "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray._reconstruct", "numpy.ma.core._mareconstruct", "pandas.core.indexes.base._new_Index",
})  # fmt: skip
#: Names whose calls call functions among their arguments, or may: constructors of torch's schedulers do.
_CALLING: Final = ("numpy.random.", "torch.")
_NOT_CALLING: Final = ("torch.fx.", "torch.jit._pickle.")
_MAKING: Final = frozenset({NEWOBJ, NEWOBJ_EX})
#: Methods of an object that reading a pickle calls if the object has them.
_METHODS: Final = frozenset({"__setstate__", "append", "extend"})
#: Dicts without attributes for their items.
_DICTS: Final = frozenset({"collections.OrderedDict", "collections.defaultdict", "collections.Counter"})
#: Most items of a list that are looked at.
_MOST_ITEMS: Final = 64
#: Most functions within functions that are followed.
_DEEPEST: Final = 100


def callable_name(value: Value) -> str:
    """The full name of a callable: of a global, an attribute of a global, a ``partial`` or a ufunc.

    Ends with :data:`COMPUTED` if only running the pickle would give it.
    """
    attributes: tuple[str, ...] = ()
    for _ in range(_DEEPEST):
        if type(value) is Global:
            return ".".join((value.full_name, *attributes))
        if type(value) is Persistent and value.module is not None:
            value = value.module
        elif type(value) is Call:
            name, items = modern_name(value.name), value.arguments
            if name == _GETATTR and len(items) == 2 and type(items[1]) is str:  # object and name
                attributes = (items[1], *attributes)
                value = items[0]
            elif name == _PARTIAL and not attributes:
                value = next(iter(_bound(value)), None)
            elif name in _UFUNCS and not attributes and [type(item) for item in items] == [str, str]:
                return ".".join(map(str, items))
            elif name == _LOAD_TYPE and not attributes and len(items) == 1 and type(items[0]) is str:
                return f"builtins.{items[0]}"
            else:
                return f"{name}.{COMPUTED}" if name else COMPUTED
        else:
            break
    return COMPUTED


def _bound(partial: Call) -> tuple[Value, ...]:
    """The function of a ``partial`` and its arguments; ``partial.__setstate__`` replaces those of the call."""
    state = tuple_items(partial.state)
    if len(state) < 3:
        return partial.arguments
    keywords = state[2].flat[1::2] if type(state[2]) is Dict else ()
    return (state[0], *tuple_items(state[1]), *keywords)


def uses_of_call(function: Value, args: Value, opcode: int) -> Iterator[tuple[str, Use]]:
    """The names that a call makes or calls, and names that it looks up."""
    waiting: list[tuple[Value, Value, Use]] = [(function, args, "made" if opcode in _MAKING else "called")]
    for _ in range(_DEEPEST):
        if not waiting:
            return
        function, args, use = waiting.pop()
        if type(function) is Opaque:  # an extension code, which has a name of its own
            continue
        name, items = modern_name(callable_name(function)), tuple_items(args)
        leaf = name.rpartition(".")[2]
        if name in LOOK_UPS:
            yield from _uses_of_look_up(name, Call(function, args, -1))
            continue
        yield name, use
        index = _CALL_FIRST.get(leaf, 0 if name in _MAKE_FIRST else -1)
        if index < 0:
            if args is not None and _may_call(name, function):
                bound = _bound(function)[1:] if type(function) is Call else ()
                waiting += [(item, None, "called") for item in _callables((*bound, *items))]
        elif type(args) is not Tuple:  # its arguments are computed
            break
        elif len(items) > index:  # else the call fails
            waiting.append((items[0], items[index], "called") if index else (items[0], None, "made"))
    yield COMPUTED, "called"


def uses_of_build(target: Value) -> Iterator[tuple[str, Use]]:
    """The name that BUILD changes: its target is a module, a class or an object that has a state already.

    No pickler of Python writes one of these.
    """
    is_object = type(target) is Call and target.state_start < 0 and modern_name(target.name) not in LOOK_UPS
    if isinstance(target, Call | Global | Persistent) and not is_object:
        yield f"{callable_name(target.func if type(target) is Call else target)}.__setstate__", "called"


def uses_of_append(target: Call) -> Iterator[tuple[str, Use]]:
    """What APPEND calls if the object has a state, which may hold its own ``append``: picklers append items first."""
    if target.state_start >= 0:
        yield f"{callable_name(target.func)}.{COMPUTED}", "called"


def uses_of_items(target: Call, flat: Sequence[Value]) -> Iterator[tuple[str, Use]]:
    """What BUILD and APPEND call if the object has its items as attributes, and one of them is called like a method."""
    if target.name not in _DICTS:
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            if type(key) is str and key in _METHODS and isinstance(value, Node):
                yield callable_name(value), "called"


def _uses_of_look_up(name: str, call: Call) -> Iterator[tuple[str, Use]]:
    """The name that a call looks up, if the pickle shows it. The type of one object is harmless."""
    found = callable_name(call)
    if name == _TYPE and len(call.arguments) == 1:
        return
    yield (name, "called") if found.endswith(COMPUTED) else (found, "stored")


def _may_call(name: str, function: Value) -> bool:
    """Whether a harmless function may call what it is given, as constructors of torch's schedulers do."""
    is_listed = name.startswith(_CALLING) and name not in WEIGHTS_ONLY_SINCE and not name.startswith(_NOT_CALLING)
    return (is_listed or type(function) is Call) and is_harmless(name)


def _callables(values: Iterable[Value]) -> Iterator[Value]:
    """The callables among some values, and among the items of lists, tuples and dicts in them."""
    for value in values:
        members = value.flat if type(value) is Dict else items_of(value)
        for member in (value, *members[:_MOST_ITEMS]):
            is_named = type(member) is Call and modern_name(member.name) in {_GETATTR, _PARTIAL}
            if is_named or type(member) is Global or (type(member) is Persistent and member.module is not None):
                yield member
        if len(members) > _MOST_ITEMS:
            yield Call(None, None, -1)  # some are not looked at


def is_settled(function: Global) -> bool:
    """Whether all calls of a function have one verdict, whatever their arguments."""
    name = modern_name(function.full_name)
    leaf = name.rpartition(".")[2]
    looks = name in LOOK_UPS or leaf in _CALL_FIRST or name in _MAKE_FIRST or _may_call(name, function)
    return not looks and not is_dangerous(name, "called")


def uses_in(found: Iterable[Node]) -> Iterator[tuple[str, Use]]:
    """The names that the nodes of a tree import, make and call."""
    for node in found:
        if type(node) is Global:
            yield node.full_name, "stored"
        elif type(node) is Call and node.func is None:
            yield from uses_of_build(node.args)
        elif type(node) is Call:
            if not (type(node.func) is Global and node.func.is_settled):
                yield from uses_of_call(node.func, node.args, node.opcode)
            if node.assigned is not None:
                yield from uses_of_items(node, node.assigned.flat)
            if node.state_start >= 0 and modern_name(node.name) in LOOK_UPS:
                yield from uses_of_build(node)
