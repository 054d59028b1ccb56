"""Nodes of the tree that represents a pickle without executing it.

Atoms are Python objects (str, bytes, int, float, bool, None); everything else is a :class:`Node`.

A ``start`` is the byte offset, in the pickle, of the operation that pushed a value at its place. It distinguishes two
readers of one memoised value, as an edit needs.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableSequence
    from collections.abc import Sequence as AnySequence

    from ckptmove.model import StorageRef

#: Opcodes of the calls that a :class:`Call` stands for.
REDUCE: Final = ord("R")
NEWOBJ: Final = 0x81
NEWOBJ_EX: Final = 0x92
OBJ: Final = ord("o")

#: Starts of the members of a container: a list, or an array in a tree that is not edited.
Starts: TypeAlias = "MutableSequence[int]"


class Node:
    """Any value that is not an atom."""

    __slots__ = ()

    def members(self) -> AnySequence[Value]:
        """Values directly in this node."""
        return ()


class Global(Node):
    """A name that the pickle would import."""

    __slots__ = ("full_name", "is_settled", "module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name
        self.full_name = f"{module}.{name}"  # stored because every call needs it
        self.is_settled = False  # whether no further call of it needs a verdict


class Python2Str(str):
    """A ``str`` of Python 2 that is not ASCII: its value depends on the ``encoding`` of the reader.

    The text is decoded as UTF-8, as torch does; other bytes become escapes.
    """

    __slots__ = ("raw",)

    raw: bytes


class ByteArray(bytes):
    """A bytearray that protocol 5 writes as BYTEARRAY8."""

    __slots__ = ()


class Sequence(Node):
    """A tuple, list, set or frozenset with the start of each item."""

    __slots__ = ("items", "starts")

    items: list[Value] | tuple[Value, ...]
    starts: Starts | tuple[int, ...]

    def members(self) -> AnySequence[Value]:
        """The items."""
        return self.items


class Tuple(Sequence):
    """A tuple. Its items are in tuples too, to save memory: a checkpoint has several for each tensor."""

    __slots__ = ()

    items: tuple[Value, ...]
    starts: tuple[int, ...]

    def __init__(self, items: tuple[Value, ...], starts: tuple[int, ...]) -> None:
        self.items = items
        self.starts = starts


class _MutableSequence(Sequence):
    """A container that later operations can add items to."""

    __slots__ = ()

    items: list[Value]
    starts: Starts

    def __init__(self, items: list[Value], starts: Starts) -> None:
        self.items = items
        self.starts = starts


class List(_MutableSequence):
    """A list."""

    __slots__ = ()


class Set(_MutableSequence):
    """A set, or a :class:`FrozenSet`."""

    __slots__ = ()


class FrozenSet(Set):
    """A frozenset. No operation adds items to it."""

    __slots__ = ()


class Dict(Node):
    """A dict as a flat list: key, value, key, value. The last value of a repeated key counts, as in Python."""

    __slots__ = ("flat", "starts")

    def __init__(self, flat: list[Value], starts: Starts) -> None:
        self.flat = flat
        self.starts = starts

    def members(self) -> AnySequence[Value]:
        """The keys and values."""
        return self.flat

    def pairs(self) -> Iterator[tuple[Value, Value, int]]:
        """Iterate over key, value, and start of the value."""
        return zip(self.keys(), islice(self.flat, 1, None, 2), islice(self.starts, 1, None, 2), strict=True)

    def get(self, key: str) -> Value:
        """Return the value of a string key, or None if it is absent."""
        found: Value = None
        for name, value, _ in self.pairs():
            if type(name) is str and name == key:
                found = value
        return found

    def keys(self) -> Iterator[Value]:
        """Iterate over the keys in order, with repeats."""
        return islice(self.flat, 0, None, 2)


class Call(Node):
    """A call that REDUCE, NEWOBJ, NEWOBJ_EX, INST or OBJ would make, and what later operations add to its result."""

    __slots__ = ("appended", "args", "args_start", "assigned", "func", "kwargs", "opcode", "state", "state_start")

    def __init__(self, func: Value, args: Value, args_start: int, opcode: int = REDUCE) -> None:
        self.opcode = opcode  # OBJ also for INST
        self.func = func  # a `Global` in every pickle that torch writes
        self.args = args  # a `Tuple` in every pickle that Python writes
        self.args_start = args_start
        self.kwargs: Value = None  # of NEWOBJ_EX
        self.state: Value = None  # argument of BUILD, for `__setstate__` or `__dict__`
        self.state_start = -1  # -1 without a state
        self.appended: List | None = None  # items of APPEND or APPENDS
        self.assigned: Dict | None = None  # pairs of SETITEM or SETITEMS

    def members(self) -> AnySequence[Value]:
        """The callable, its arguments, its state, and the items added to the result."""
        return self.func, self.args, self.kwargs, self.state, self.appended, self.assigned

    @property
    def arguments(self) -> tuple[Value, ...]:
        """The positional arguments."""
        return tuple_items(self.args)

    @property
    def name(self) -> str:
        """Full name of the callable, or an empty string if it is not a global."""
        func = self.func.module if type(self.func) is Persistent else self.func
        return func.full_name if type(func) is Global else ""


class Persistent(Node):
    """A persistent id: an object that the pickle's reader provides. In torch: storages, and classes of modules."""

    __slots__ = ("pid", "pid_start")

    def __init__(self, pid: Value, pid_start: int) -> None:
        self.pid = pid
        self.pid_start = pid_start

    def members(self) -> AnySequence[Value]:
        """The id."""
        return (self.pid,)

    @property
    def module(self) -> Value:
        """The class in ``('module', class, source_file, source)``, or None for any other id.

        From torch/serialization.py ``_legacy_load``, which returns the class for this id.
        """
        items = tuple_items(self.pid)
        return items[1] if len(items) > 1 and items[0] == "module" else None


class Opaque(Node):
    """A value that only the pickle's reader has: an out-of-band buffer or an extension code."""

    __slots__ = ("description",)

    def __init__(self, description: str) -> None:
        self.description = description


#: Marks a value in the memo that is part of a :class:`PlainObject`, and is not kept.
WITHIN: Final = Opaque("part of a plain object")


class PlainKind:
    """A class by its full name, and the names of the fields of an object of it, in order."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: tuple[str, ...]) -> None:
        self.name = name
        self.fields = fields


class PlainObject(Node):
    """An object that is built as Python pickles a dataclass, with plain values: it replaces a call and a dict."""

    __slots__ = ("kind", "values")

    def __init__(self, kind: PlainKind, values: tuple[Value, ...]) -> None:
        self.kind = kind
        self.values = values  # a string, an int, None, or a tuple of ints for each field; also for a `torch.Size`

    def get(self, field: str) -> Value:
        """Return the value of a field, or None if it is absent."""
        fields = self.kind.fields
        return self.values[fields.index(field)] if field in fields else None


class PlainStorage(Persistent):
    """The persistent id of a storage that only plain tensors have, and whose sites are not known."""

    __slots__ = ("ref",)

    def __init__(self, ref: StorageRef) -> None:
        super().__init__(None, -1)
        self.ref = ref


class PlainTensor(Node):
    """A tensor of ``_rebuild_tensor_v2`` without attributes and hooks, within its storage: it replaces a call."""

    __slots__ = ("dtype", "offset", "requires_grad", "shape", "storage", "stride")

    def __init__(
        self,
        storage: PlainStorage,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        *,
        dtype: str,
        requires_grad: bool,
    ) -> None:
        self.storage = storage
        self.dtype = dtype  # that of its storage, unless torch has no storage class for it
        self.offset = offset  # of its first element in the storage
        self.shape = shape
        self.stride = stride
        self.requires_grad = requires_grad


#: Nodes whose value is not known without executing the pickle.
MADE: Final = (Call, Persistent, Opaque)

Value: TypeAlias = "Node | str | bytes | int | float | bool | None"


def items_of(value: Value) -> list[Value] | tuple[Value, ...]:
    """Items of a tuple, a list or a set; empty for any other value."""
    return value.items if isinstance(value, Sequence) else ()


def tuple_items(value: Value) -> tuple[Value, ...]:
    """Items of a tuple; empty for any other value."""
    return value.items if type(value) is Tuple else ()


def nodes(root: Value) -> Iterator[Node]:
    """Iterate over the nodes of a tree, each once, in the order of the pickle."""
    seen: set[int] = set()
    stack = [root] if isinstance(root, Node) else []
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            stack += [member for member in reversed(node.members()) if isinstance(member, Node)]
