"""The names that a call in a pickle uses: the function that it calls, and functions that this one calls in turn.

A name can be called without standing where the function of a call stands: as an attribute (``getattr``), in a
``functools.partial``, or as an argument of a function that calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.pickles.tree import (
    NEWOBJ,
    NEWOBJ_EX,
    REDUCE,
    Call,
    Dict,
    Global,
    Node,
    Opaque,
    Persistent,
    Tuple,
    tuple_items,
)
from ckptmove.torch_facts.harmless import is_harmless
from ckptmove.torch_facts.verdicts import COMPUTED, LOOK_UPS, is_dangerous
from ckptmove.torch_facts.weights_only import WEIGHTS_ONLY_SINCE, modern_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

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
#: Functions that give their object a state, their fourth argument.
_WITH_STATE: Final = frozenset({"_rebuild_from_type", "_rebuild_from_type_v2", "_rebuild_parameter_with_state"})
#: Functions that make an object of their first argument, a class, as NEWOBJ does.
_MAKE_FIRST: Final = frozenset({
    "copyreg.__newobj__", "copyreg.__newobj_ex__", "copyreg._reconstructor", "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray._reconstruct", "numpy.ma.core._mareconstruct", "pandas.core.indexes.base._new_Index",
})  # fmt: skip
#: Harmless names whose calls only store their arguments, or call methods of :data:`_METHODS` at most.
_STORING: Final = (
    "_operator.", "argparse.", "builtins.", "collections.", "contextlib.", "copyreg.", "functools.", "itertools.",
    "operator.", "torch.fx.", "torch.jit._pickle.", "types.", "typing.",
)  # fmt: skip
_MAKING: Final = frozenset({NEWOBJ, NEWOBJ_EX})
#: Methods that reading a pickle, or a class that stores its arguments, looks up on an object, as ``dict`` does; and the
#: one that ``Optimizer.__setstate__`` of torch calls.
_METHODS: Final = frozenset({
    *dir(dict), *dir(list), *dir(set), "_patch_step_function", "as_subclass", "detach", "requires_grad_", "to",
})  # fmt: skip
#: A class whose argument is a mapping of its attributes, since Python 3.13.
_NAMESPACE: Final = "types.SimpleNamespace"
#: Functions that make callables.
_CALLABLES: Final = frozenset({_GETATTR, _PARTIAL, "copyreg.__newobj__", "copyreg.__newobj_ex__"})
#: Dicts without attributes for their items.
_DICTS: Final = frozenset({"collections.OrderedDict", "collections.defaultdict", "collections.Counter"})
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
                # `partial.__setstate__` replaces the function of the call.
                items = tuple_items(value.args if value.state_start < 0 else value.state)
                value = items[0] if items else None
            elif name in _UFUNCS and not attributes and [type(item) for item in items] == [str, str]:
                return ".".join(map(str, items))
            elif name == _LOAD_TYPE and not attributes and len(items) == 1 and type(items[0]) is str:
                return f"builtins.{items[0]}"
            else:
                return f"{name}.{COMPUTED}" if name else COMPUTED
        else:
            break
    return COMPUTED


def uses_of_call(
    function: Value, args: Value, kwargs: Value, opcode: int, given: list[Value]
) -> Iterator[tuple[str, Use]]:
    """The names that a call makes or calls, and names that it looks up.

    Values that a harmless function may call, or whose attributes it may call, are added to ``given``.
    """
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
        if leaf in _WITH_STATE:
            given += methods_in_state(items[3] if len(items) > 3 else None) if type(args) is Tuple else [args]
        index = _CALL_FIRST.get(leaf, 0 if name in _MAKE_FIRST else -1)
        if index < 0:
            if _may_call(name, function):
                given += [function, args, kwargs] if type(function) is Call else [args, kwargs]
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
    """What APPEND calls if the object has attributes, which may hold its own ``append``.

    Picklers append items first. Keys of some dicts are attributes.
    """
    has_items = target.assigned is not None and target.name not in _DICTS
    if target.state_start >= 0 or has_items or (target.name == _NAMESPACE and target.arguments):
        yield f"{callable_name(target.func)}.{COMPUTED}", "called"


def methods_in_state(state: Value) -> Iterator[Value]:
    """The attributes in the state of an object that are called like its methods; all of a state that is computed."""
    items = tuple_items(state)
    for part in (state, *(items if len(items) == 2 else items[3:4])):  # attributes and slots; those of a partial
        if type(part) is Call and _is_computed(part):
            yield part
        pairs = part.assigned if type(part) is Call else part
        if type(pairs) is Dict:
            yield from _methods_in(pairs.flat, _METHODS)


def _is_computed(state: Call) -> bool:
    """Whether a call of a harmless function makes a state of its arguments, as ``dict([["keys", f]])`` does."""
    has_arguments = type(state.args) is not Tuple or state.args.items or state.kwargs is not None
    return bool(has_arguments) and is_harmless(modern_name(state.name))


def methods_in_items(target: Call, flat: Sequence[Value]) -> Iterator[Value]:
    """The same of the items of an object that may have them as attributes."""
    if target.name not in _DICTS:
        yield from _methods_in(flat, ())


def _methods_in(flat: Sequence[Value], names: Collection[str]) -> Iterator[Value]:
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        if isinstance(value, Call | Global | Persistent):
            is_dunder = isinstance(key, str) and key.startswith("__") and key.endswith("__")
            if (is_dunder and key != "__wrapped__") or key == "keys" or type(key) is Call:
                yield value
            elif key in names and not (type(value) is Call and modern_name(value.name) not in _CALLABLES):
                yield value  # objects have data with such names: items, index, values


def made_in(persistent: Persistent) -> Iterator[Value]:
    """The objects in a persistent id: torch calls methods of the location of a storage."""
    return (item for item in (persistent.pid, *tuple_items(persistent.pid)) if type(item) is Call)


def uses_of_given(given: Iterable[Value]) -> Iterator[tuple[str, Use]]:
    """What harmless functions may call of the values that they are given: each callable in them, however deep."""
    seen: set[int] = set()
    stack = [value for value in given if isinstance(value, Node)]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        members, name = node.members(), ""
        if members or type(node) is Global:  # not an empty container, of which a file may have millions
            seen.add(id(node))
        if type(node) is Call:
            members, name = members[1:], modern_name(node.name)  # not its function, which the call itself uses
        if name == _GETATTR or type(node) is Global or (type(node) is Persistent and node.module is not None):
            yield from uses_of_call(node, None, None, REDUCE, [])
            continue
        stack += [member for member in members if isinstance(member, Node)]


def _uses_of_look_up(name: str, call: Call) -> Iterator[tuple[str, Use]]:
    """The name that a call looks up, if the pickle shows it. The type of one object is harmless."""
    found = callable_name(call)
    if name == _TYPE and len(call.arguments) == 1:
        return
    yield (name, "called") if found.endswith(COMPUTED) else (found, "stored")


def _may_call(name: str, function: Value) -> bool:
    """Whether a harmless function may call what it is given, as constructors of torch's schedulers do."""
    is_storing = name in WEIGHTS_ONLY_SINCE or name.startswith(_STORING)
    return (not is_storing or type(function) is Call) and is_harmless(name)


def is_settled(function: Global) -> bool:
    """Whether all calls of a function have one verdict, whatever their arguments."""
    name = modern_name(function.full_name)
    leaf = name.rpartition(".")[2]
    looks = name in LOOK_UPS or name in _MAKE_FIRST or leaf in _CALL_FIRST or leaf in _WITH_STATE
    looks = looks or _may_call(name, function)
    return not looks and not is_dangerous(name, "called")


def uses_in(found: Iterable[Node]) -> Iterator[tuple[str, Use]]:
    """The names that the nodes of a tree import, make and call."""
    given: list[Value] = []
    for node in found:
        if type(node) is Global:
            yield node.full_name, "stored"
        elif type(node) is Call and node.func is None:
            yield from uses_of_build(node.args)
        elif type(node) is Call:
            if not (type(node.func) is Global and node.func.is_settled):
                yield from uses_of_call(node.func, node.args, node.kwargs, node.opcode, given)
            given += methods_in_state(node.state)
            if node.assigned is not None:
                given += methods_in_items(node, node.assigned.flat)
            if node.state_start >= 0 and modern_name(node.name) in LOOK_UPS:
                yield from uses_of_build(node)
        elif type(node) is Persistent:
            given += made_in(node)
    yield from uses_of_given(given)
