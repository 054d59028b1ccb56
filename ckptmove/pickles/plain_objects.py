"""Read an object whose fields are plain values in one step, as one small node.

The ``.metadata`` of a large distributed checkpoint has millions of these objects. Python writes each with about
twenty-five operations (``object.__reduce_ex__`` in protocol 4): the class, an empty tuple, NEWOBJ, a dict, and BUILD.
A pattern matches all of them at once. Objects that it does not match are read operation by operation.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedPickle
from ckptmove.pickles import structure
from ckptmove.pickles.build import new_tuple
from ckptmove.pickles.compact_memo import (
    GET_BYTES,
    HANDLERS,
    LONG_GET,
    LONG_GET_BYTES,
    NeedsEveryOperation,
    NeedsOneOperation,
    number,
    recalled,
)
from ckptmove.pickles.machine import interpret, interpret_with
from ckptmove.pickles.tree import WITHIN, Global, PlainKind, PlainObject, Tuple

if TYPE_CHECKING:
    from ckptmove.limits import Limits
    from ckptmove.pickles.state import Handler, Machine
    from ckptmove.pickles.tree import Value

_GET: Final = rb"(?:h.|j.{4})"
_INT: Final = rb"(?:K.|M..|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
#: A new string, up to the first byte that is not ASCII; `_read_value` compares this with its length.
_TEXT: Final = rb"\x8c.[\x00-\x7f]{0,255}\x94"
#: A call of ``torch.Size`` with a tuple of up to three numbers.
_SIZE: Final = _GET + rb"(?:\)|(?:%b\x85|%b\x86|%b\x87)\x94)\x85\x94R\x94" % (_INT, _INT * 2, _INT * 3)
_FIELD: Final = rb"(%b)(N|%b|%b|%b|%b)" % (_GET, _INT, _TEXT, _SIZE, _GET)
#: All operations after the one that pushes the class; two to four fields. It takes milliseconds to compile.
_OBJECT: Final = rb"(?s)\)\x81\x94\}\x94\(%b(?:%b)?(?:%b)?ub" % (_FIELD * 2, _FIELD, _FIELD)
_NUMBERS: Final = re.compile(rb"(?s)" + _INT)

_EMPTY_TUPLE, _NONE, _NEW_TEXT, _GETS = ord(")"), ord("N"), 0x8C, frozenset(b"hj")
#: Length of the operations of a ``torch.Size`` after those of its numbers.
_SIZE_END: Final = 4
_SIZE_CLASS: Final = "torch.Size"
#: Nodes that are kept to be used again: most sizes and offsets are those of many tensors.
_MOST_KNOWN: Final = 1 << 14


def interpret_objects(data: bytes, limits: Limits, classes: frozenset[str]) -> Machine:
    """Read one pickle as data, with the plain objects of some classes as :class:`PlainObject`.

    Its tree takes a tenth of the memory, but cannot be edited. A pickle that changes an object later, or is damaged, is
    read again as :func:`interpret` does.

    Arguments and errors as of :func:`interpret`.
    """
    with suppress(DamagedPickle, NeedsEveryOperation):
        return interpret_with(data, limits, PlainObjects(classes).handlers())
    return interpret(data, limits)


class PlainObjects:
    """Reader of plain objects for one pickle."""

    def __init__(self, classes: frozenset[str]) -> None:
        """Read the objects of some classes, by their full names."""
        self._classes = classes
        self._match = re.compile(_OBJECT).match
        # By their bytes in the pickle: no index of the memo changes its value, see `compact_memo`.
        self._kinds: dict[tuple[str, tuple[bytes | None, ...]], PlainKind] = {}
        self._values: dict[bytes, tuple[Value, tuple[Value, ...]]] = {}
        self._known: dict[tuple[PlainKind, tuple[Value, ...]], PlainObject] = {}

    def handlers(self) -> dict[int, Handler]:
        """Handlers that replace those of the machine."""
        return HANDLERS | {_EMPTY_TUPLE: self._handle}

    def _handle(self, machine: Machine, position: int) -> int:
        """Handle EMPTY_TUPLE: it follows a class if an object begins."""
        end = self._read(machine, position)
        return structure.HANDLERS[_EMPTY_TUPLE](machine, position) if end == position else end

    def _read(self, machine: Machine, position: int) -> int:
        """Replace the class on top of the stack with its object; return its end, or ``position`` if it is not plain."""
        function = machine.stack[-1] if machine.stack else None
        if type(function) is not Global or function.full_name not in self._classes:
            return position
        match = self._match(machine.data, position)
        if match is None:
            return position
        found = match.groups()
        memo: list[Value] = [WITHIN, WITHIN]  # the object and the dict of its fields
        values: list[Value] = []
        try:
            names = function.full_name, found[::2]
            kind = self._kinds.get(names) or self._new_kind(machine, *names)
            for raw in found[1 : 2 * len(kind.fields) : 2]:
                value, memoized = self._values.get(raw) or self._new_value(machine, raw)
                values.append(value)
                memo += memoized
        except (NeedsOneOperation, IndexError):  # IndexError: an index that the memo does not have
            return position
        machine.memo += memo
        machine.containers += 1
        machine.stack[-1], machine.starts[-1] = self._object(kind, tuple(values)), -1
        return match.end()

    def _object(self, kind: PlainKind, values: tuple[Value, ...]) -> PlainObject:
        known = self._known.get((kind, values))
        if known is None:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            known = self._known[kind, values] = PlainObject(kind, values)
        return known

    def _new_kind(self, machine: Machine, name: str, found: tuple[bytes | None, ...]) -> PlainKind:
        fields = [recalled(machine, raw) for raw in found if raw is not None]
        names = tuple([field for field in fields if type(field) is str])
        if len(set(names)) < len(fields):
            raise NeedsOneOperation
        kind = self._kinds[name, found] = PlainKind(name, names)
        return kind

    def _new_value(self, machine: Machine, raw: bytes) -> tuple[Value, tuple[Value, ...]]:
        """A value, and what its operations put into the memo."""
        if len(self._values) > _MOST_KNOWN:
            self._values.clear()
        found = self._values[raw] = _read_value(machine, raw)
        return found


def _read_value(machine: Machine, raw: bytes) -> tuple[Value, tuple[Value, ...]]:
    code = raw[0]
    if code == _NEW_TEXT:
        if raw[1] != len(raw) - 3:  # it does not end where the pattern ends
            raise NeedsOneOperation
        text = raw[2:-1].decode()
        return text, (text,)
    if code not in _GETS:
        return None if code == _NONE else number(raw), ()
    begin = LONG_GET_BYTES if code == LONG_GET else GET_BYTES
    value = recalled(machine, raw[:begin])
    if len(raw) > begin:
        if type(value) is not Global or value.full_name != _SIZE_CLASS:
            raise NeedsOneOperation
        numbers = tuple(map(number, _NUMBERS.findall(raw, begin, len(raw) - _SIZE_END)))
        size = new_tuple(*numbers)
        # The tuple of numbers, unless it is empty; the tuple of arguments, which nothing else reads; the size.
        return size, ((size, WITHIN, size) if numbers else (WITHIN, size))
    if type(value) is not str and not (type(value) is Tuple and all(type(one) is int for one in value.items)):
        raise NeedsOneOperation
    return value, ()
