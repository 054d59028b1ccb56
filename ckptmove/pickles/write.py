"""Write a tree as a pickle: the inverse of :func:`ckptmove.pickles.machine.interpret`.

The operations and their order are those of Python's pickler (``Lib/pickle.py``) for protocol 2, which ``torch.save``
writes and the weights-only unpickler reads. Values that protocol 2 has no operation for are written with a later one.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptmove.errors import UneditablePickle
from ckptmove.pickles.tree import (
    NEWOBJ_EX,
    OBJ,
    ByteArray,
    Call,
    Dict,
    FrozenSet,
    Global,
    List,
    Opaque,
    Persistent,
    Python2Str,
    Set,
    Tuple,
)
from ckptmove.torch_facts.verdicts import COMPUTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as AnySequence

    from ckptmove.pickles.tree import Node, Value

    Members: TypeAlias = "Iterator[Value]"

_HEAD: Final = b"\x80\x02"
_MARK: Final = b"("
_POP: Final = b"0"
_POP_MARK: Final = b"1"
_BUILD: Final = b"b"
_STOP: Final = b"."
#: Opcodes for tuples of 0 to 3 items; others take all items above a mark.
_TUPLES: Final = (b")", b"\x85", b"\x86", b"\x87")
_TUPLE: Final = b"t"
#: Operations for one item, or one key and value, and for a batch above a mark.
_APPEND: Final = b"a", b"e"
_SETITEM: Final = b"s", b"u"
_ADDITEMS: Final = b"", b"\x90"
#: Items of one batch, pickle.py ``_BATCHSIZE``.
_BATCH: Final = 1000
#: Size in bytes of the length field, opcode and protocol of the operations for a text or bytes; shortest first.
_TEXT: Final = ((4, 0x58, 2), (8, 0x8D, 4))
_PYTHON2_TEXT: Final = ((1, 0x55, 2), (4, 0x54, 2))
_BYTES: Final = ((1, 0x43, 3), (4, 0x42, 3), (8, 0x8E, 4))
_BYTEARRAY: Final = ((8, 0x96, 5),)
_LONG: Final = ((1, 0x8A, 2), (4, 0x8B, 2))
_U4: Final = struct.Struct("<cI").pack
_I4: Final = struct.Struct("<ci").pack
_U2: Final = struct.Struct("<cH").pack
_F8: Final = struct.Struct(">cd").pack
_SMALL_INTS: Final = tuple(bytes((ord("K"), value)) for value in range(256))
#: Place of a node whose operation is not written yet.
_OPEN: Final = -1
#: Items written again because a tuple or the arguments of a call contain themselves through other containers. Python's
#: pickler repeats them too, but stops at its recursion limit.
_MOST_REPEATED: Final = 1 << 20


def write_pickle(root: Value) -> bytes:
    """Write a tree as one pickle of protocol 2, or of the lowest later one that has an operation for every value.

    A node, a string or bytes with several references is written once and read from the memo; so are equal globals. A
    call with a ``state`` other than None, or a ``state_start`` of 0 or more, gets a BUILD.
    """
    return _Writer().write(root)


class _Writer:
    """State of one pickle that is being written."""

    __slots__ = ("globals", "indices", "out", "places", "protocol", "repeated")

    def __init__(self) -> None:
        self.out = bytearray(_HEAD)  # the operations, without the PUTs
        #: End in ``out`` of the operation that pushes a node, a string or bytes, by ``id``.
        self.places: dict[int, int] = {}
        self.indices: dict[int, int] = {}  # memo indices of the values that are read again, by their place
        self.globals: dict[tuple[str, str], Global] = {}  # the first node of each global
        self.protocol = 2  # lowest protocol that has all operations
        self.repeated = 0  # number of items written again

    def write(self, root: Value) -> bytes:
        """Write the tree and insert the PUTs."""
        places = self.places
        todo: list[Members] = [iter((root,))]
        while todo:
            for value in todo[-1]:
                place = places.get(id(value))
                if place is None or place == _OPEN:
                    members = _WRITERS[type(value)](self, value)
                    if members is not None:
                        todo.append(members)
                        break
                else:
                    self.recall(place)
            else:
                todo.pop()
        out = self.out + _STOP
        out[1] = self.protocol
        ordered = sorted(self.indices)
        pieces: list[bytes | bytearray] = [out[: ordered[0]] if ordered else out]
        for place, end in pairwise([*ordered, len(out)]):
            pieces += _memo_operation(b"q", b"r", self.indices[place]), out[place:end]
        return b"".join(pieces)

    def recall(self, place: int) -> None:
        """Read a value from the memo."""
        self.out += _memo_operation(b"h", b"j", self.indices.setdefault(place, len(self.indices)))

    def push(self, value: Node | str | bytes, operation: bytes) -> None:
        """Write the last operation of a value, which can be read from the memo afterwards."""
        self.out += operation
        self.places[id(value)] = len(self.out)

    def open(self, node: Tuple | FrozenSet | Call | Persistent) -> None:
        """Note that the members of a node are being written; the node itself can be among their members."""
        if self.places.get(id(node)) == _OPEN:
            self.repeated += len(node.members())
            if self.repeated > _MOST_REPEATED:
                raise UneditablePickle("too many cycles through tuples", offset=0)
        self.places[id(node)] = _OPEN

    def close(self, node: Node, operation: bytes, pops: bytes) -> bool:
        """Make a node of its members on the stack.

        Returns:
            False if the node was written as a member of a member: then the members are popped, as in Python's pickler.
        """
        place = self.places[id(node)]
        if place == _OPEN:
            self.push(node, operation)
            return True
        self.out += pops
        self.recall(place)
        return False

    def need(self, protocol: int) -> None:
        """Raise the protocol of the pickle, if needed."""
        self.protocol = max(self.protocol, protocol)

    def counted(self, raw: bytes, forms: tuple[tuple[int, int, int], ...]) -> bytes:
        """Return the shortest operation for bytes that are preceded by their length."""
        size = len(raw)
        width, opcode, protocol = next(form for form in forms if size >> 8 * form[0] == 0)
        self.need(protocol)
        return b"%c%b%b" % (opcode, size.to_bytes(width, "little"), raw)


def _memo_operation(short: bytes, long: bytes, index: int) -> bytes:
    return short + _SMALL_INTS[index][1:] if index < len(_SMALL_INTS) else _U4(long, index)


def _batches(writer: _Writer, values: AnySequence[Value], step: int, operations: tuple[bytes, bytes]) -> Members:
    """Add items, or keys and values, to the container on top of the stack."""
    one, many = operations
    for begin in range(0, len(values), step * _BATCH):
        batch = values[begin : begin + step * _BATCH]
        if one and len(batch) == step:
            yield from batch
            writer.out += one
        else:
            writer.out += _MARK
            yield from batch
            writer.out += many


def _none(writer: _Writer, _: None) -> None:
    writer.out += b"N"


def _bool(writer: _Writer, value: bool) -> None:
    writer.out += b"\x88" if value else b"\x89"


def _int(writer: _Writer, value: int) -> None:
    if 0 <= value < 1 << 8:
        writer.out += _SMALL_INTS[value]
    elif 0 <= value < 1 << 16:
        writer.out += _U2(b"M", value)
    elif -(1 << 31) <= value < 1 << 31:
        writer.out += _I4(b"J", value)
    else:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        writer.out += writer.counted(raw, _LONG)


def _float(writer: _Writer, value: float) -> None:
    writer.out += _F8(b"G", value)


def _global(writer: _Writer, node: Global) -> None:
    first = writer.globals.setdefault((node.module, node.name), node)
    if first is not node:
        writer.recall(writer.places[id(first)])
        return
    if COMPUTED in {node.module, node.name}:
        raise UneditablePickle("a name that the pickle computes,", offset=0)
    # The name of a nested class needs protocol 4; GLOBAL cannot hold a newline or a surrogate.
    if "." in node.name or not node.full_name.isprintable():
        writer.need(4)
        parts = (part.encode("utf-8", "surrogatepass") for part in (node.module, node.name))
        writer.push(node, b"".join(writer.counted(part, _TEXT) for part in parts) + b"\x93")
    else:
        writer.push(node, f"c{node.module}\n{node.name}\n".encode())


def _tuple(writer: _Writer, node: Tuple) -> Members | None:
    if node.items:
        return _tuple_items(writer, node)
    writer.out += _TUPLES[0]
    return None


def _tuple_items(writer: _Writer, node: Tuple) -> Members:
    writer.open(node)
    size = len(node.items)
    if size < len(_TUPLES):
        yield from node.items
        writer.close(node, _TUPLES[size], _POP * size)
    else:
        writer.out += _MARK
        yield from node.items
        writer.close(node, _TUPLE, _POP_MARK)


def _list(writer: _Writer, node: List) -> Members:
    writer.push(node, b"]")
    return _batches(writer, node.items, 1, _APPEND)


def _set(writer: _Writer, node: Set) -> Members:
    writer.need(4)
    writer.push(node, b"\x8f")
    return _batches(writer, node.items, 1, _ADDITEMS)


def _frozenset(writer: _Writer, node: FrozenSet) -> Members:
    writer.need(4)
    writer.open(node)
    writer.out += _MARK
    yield from node.items
    writer.close(node, b"\x91", _POP_MARK)


def _dict(writer: _Writer, node: Dict) -> Members:
    writer.push(node, b"}")
    return _batches(writer, node.flat, 2, _SETITEM)


def _persistent(writer: _Writer, node: Persistent) -> Members:
    writer.open(node)
    yield node.pid
    writer.close(node, b"Q", _POP)


def _call(writer: _Writer, node: Call) -> Members:
    if node.func is None:
        raise UneditablePickle("a second BUILD of an object, or one of a value that is not an object,", offset=0)
    writer.open(node)
    if node.opcode == OBJ:
        writer.out += _MARK
        yield node.func
        yield from node.args.items  # type: ignore[union-attr]  # the machine makes this tuple
        is_new = writer.close(node, bytes([OBJ]), _POP_MARK)
    else:
        yield node.func
        yield node.args
        if node.opcode == NEWOBJ_EX:
            writer.need(4)
            yield node.kwargs
        is_new = writer.close(node, bytes([node.opcode]), _POP * (3 if node.opcode == NEWOBJ_EX else 2))
    if is_new:
        if node.appended is not None:
            yield from _batches(writer, node.appended.items, 1, _APPEND)
        if node.assigned is not None:
            yield from _batches(writer, node.assigned.flat, 2, _SETITEM)
        if node.state is not None or node.state_start >= 0:
            yield node.state
            writer.out += _BUILD


def _opaque(_: _Writer, node: Opaque) -> None:
    raise UneditablePickle(f"{node.description}, a value that only its reader has,", offset=0)


_WRITERS: Final[dict[type, Callable[[_Writer, Any], Members | None]]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    str: lambda writer, value: writer.push(value, writer.counted(value.encode("utf-8", "surrogatepass"), _TEXT)),
    Python2Str: lambda writer, value: writer.push(value, writer.counted(value.raw, _PYTHON2_TEXT)),
    bytes: lambda writer, value: writer.push(value, writer.counted(value, _BYTES)),
    ByteArray: lambda writer, value: writer.push(value, writer.counted(value, _BYTEARRAY)),
    Global: _global,
    Tuple: _tuple,
    List: _list,
    Set: _set,
    FrozenSet: _frozenset,
    Dict: _dict,
    Persistent: _persistent,
    Call: _call,
    Opaque: _opaque,
}
