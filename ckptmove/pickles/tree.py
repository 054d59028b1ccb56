"""The inert tree that a pickle stands for: what it would build, had it been executed.

Never holds a live object of the pickle: atoms are Python's own (str, bytes, int, float, bool, None), the rest nodes.

A ``start`` is the byte offset, in the pickle, of the operation that pushed the value at that place. It tells two
readers of one memoised value apart, which is what an edit needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as AnySequence


class Node:
    """Whatever in a pickle is not an atom."""

    __slots__ = ()

    def members(self) -> AnySequence[Value]:
        """The values that it holds."""
        return ()


class Global(Node):
    """A name that the pickle would import.

    Attributes:
        module: dotted module, as written.
        name: qualified name inside it.
        full_name: both joined by a dot; it is asked for with every call.
    """

    __slots__ = ("full_name", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.full_name = f"{module}.{name}"


class Sequence(Node):
    """A tuple, list, set or frozenset with the start of each item.

    Attributes:
        items: the items in the order of the pickle.
        starts: their starts, parallel to ``items``.
    """

    __slots__ = ("items", "starts")

    items: list[Value] | tuple[Value, ...]
    starts: list[int] | tuple[int, ...]

    def members(self) -> AnySequence[Value]:
        """The items."""
        return self.items


class Tuple(Sequence):
    """A tuple; what it holds is in tuples too, since a checkpoint has several for each tensor."""

    __slots__ = ()

    items: tuple[Value, ...]
    starts: tuple[int, ...]

    def __init__(self, items: tuple[Value, ...], starts: tuple[int, ...]) -> None:
        self.items = items
        self.starts = starts


class _Growing(Sequence):
    """What operations after the one that made it put items into."""

    __slots__ = ()

    items: list[Value]
    starts: list[int]

    def __init__(self, items: list[Value], starts: list[int]) -> None:
        self.items = items
        self.starts = starts


class List(_Growing):
    """A list."""

    __slots__ = ()


class Set(_Growing):
    """A set or a frozenset."""

    __slots__ = ()


class Dict(Node):
    """A dict, its pairs laid flat: key, value, key, value.

    Attributes:
        flat: keys and values in turn; a key that comes twice counts with its last value, as in Python.
        starts: their starts, parallel to ``flat``.
    """

    __slots__ = ("flat", "starts")

    def __init__(self, flat: list[Value], starts: list[int]) -> None:
        self.flat = flat
        self.starts = starts

    def members(self) -> AnySequence[Value]:
        """Keys and values."""
        return self.flat

    def pairs(self) -> Iterator[tuple[Value, Value, int]]:
        """Each key with its value and the value's start."""
        return zip(self.flat[::2], self.flat[1::2], self.starts[1::2], strict=True)

    def get(self, key: str) -> Value:
        """The value of a string key, or None; a None in the pickle reads the same."""
        found: Value = None
        for name, value, _ in self.pairs():
            if type(name) is str and name == key:
                found = value
        return found

    def keys(self) -> Iterator[Value]:
        """The keys in order, repeats included."""
        return iter(self.flat[::2])


class Call(Node):
    """What REDUCE, NEWOBJ, NEWOBJ_EX, INST or OBJ would call, and what was then put into the result.

    Attributes:
        func: the callable: a :class:`Global` in every pickle that torch writes.
        args: the arguments: a :class:`Tuple` in every pickle that Python writes.
        args_start: start of ``args``.
        kwargs: keyword arguments of NEWOBJ_EX, else None.
        state: what BUILD would hand to ``__setstate__`` or ``__dict__``, else None.
        state_start: start of ``state``, -1 without one.
        appended: items that APPEND or APPENDS would append, or None.
        assigned: pairs that SETITEM or SETITEMS would assign, or None.
    """

    __slots__ = ("appended", "args", "args_start", "assigned", "func", "kwargs", "state", "state_start")

    def __init__(self, func: Value, args: Value, args_start: int) -> None:
        self.func = func
        self.args = args
        self.args_start = args_start
        self.kwargs: Value = None
        self.state: Value = None
        self.state_start = -1
        self.appended: List | None = None
        self.assigned: Dict | None = None

    def members(self) -> AnySequence[Value]:
        """The callable, its arguments, and what is put into the result."""
        return self.func, self.args, self.kwargs, self.state, self.appended, self.assigned

    @property
    def name(self) -> str:
        """Full name of the callable, or an empty string where it is not a global."""
        func = self.func.module if type(self.func) is Persistent else self.func
        return func.full_name if type(func) is Global else ""


class Persistent(Node):
    """A persistent id: an object that the pickle leaves to its reader; torch's are storages and modules.

    Attributes:
        pid: the id.
        pid_start: its start.
    """

    __slots__ = ("pid", "pid_start")

    def __init__(self, pid: Value, pid_start: int) -> None:
        self.pid = pid
        self.pid_start = pid_start

    def members(self) -> AnySequence[Value]:
        """The id."""
        return (self.pid,)

    @property
    def module(self) -> Value:
        """The class that ``('module', class, source_file, source)`` stands for, or None where the id is no such one.

        From torch/serialization.py ``_legacy_load``, whose reader puts the class in its place.
        """
        items = self.pid.items if type(self.pid) is Tuple else ()
        return items[1] if len(items) > 1 and items[0] == "module" else None


class Opaque(Node):
    """A value that only the pickle's reader could have: an out-of-band buffer or an extension code.

    Attributes:
        description: what it is, for people.
    """

    __slots__ = ("description",)

    def __init__(self, description: str) -> None:
        self.description = description


#: Nodes that stand for any value at all: only a run of the pickle would show which.
MADE: Final = (Call, Persistent, Opaque)

Value: TypeAlias = "Node | str | bytes | int | float | bool | None"
