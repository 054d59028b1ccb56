"""Handlers of the memo for a tree that is read in larger steps than operations, and is not edited.

The memo has no starts, containers have theirs in arrays, and nothing is recorded for edits. Empty containers share
their content, which takes three times their own memory. The pickle must number its memo in order, as Python does: an
index then never changes its value, and equal bytes mean equal values.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from ckptmove.pickles.tree import WITHIN, Dict, List

if TYPE_CHECKING:
    from ckptmove.pickles.state import Handler, Machine
    from ckptmove.pickles.tree import Value

GET_BYTES, LONG_GET_BYTES = 2, 5
LONG_GET: Final = ord("j")


class NeedsEveryOperation(Exception):
    """The pickle numbers its memo itself, or reads a value that is not kept."""


class NeedsOneOperation(Exception):
    """A value is not one that is read in a larger step."""


def recalled(machine: Machine, raw: bytes) -> Value:
    """Return the value of a BINGET or LONG_BINGET."""
    return machine.memo[raw[1] if len(raw) == GET_BYTES else int.from_bytes(raw[1:], "little")]


def number(raw: bytes) -> int:
    """Return the argument of a BININT1, BININT2, BININT or LONG1."""
    if raw[0] in b"KM":
        return int.from_bytes(raw[1:], "little")
    return int.from_bytes(raw[1:] if raw[0] == ord("J") else raw[2:], "little", signed=True)


def _memoize(machine: Machine, position: int) -> int:
    machine.memo.append(machine.stack[-1])
    return position + 1


def _put(length: int) -> Handler:
    def handle(machine: Machine, position: int) -> int:
        end = position + length
        if int.from_bytes(machine.data[position + 1 : end], "little") != len(machine.memo):
            raise NeedsEveryOperation
        machine.memo.append(machine.stack[-1])
        return end

    return handle


def _get(length: int) -> Handler:
    def handle(machine: Machine, position: int) -> int:
        value = recalled(machine, machine.data[position : position + length])
        if value is WITHIN:
            raise NeedsEveryOperation
        machine.stack.append(value)
        machine.starts.append(position)
        return position + length

    return handle


def _other(_: Machine, __: int) -> int:
    """Protocol 0 is read operation by operation."""
    raise NeedsEveryOperation


#: Content of empty containers: the first operation that adds members replaces it.
_NO_MEMBERS: Final[list[Value]] = []
_NO_STARTS: Final = array("q")


def _empty(kind: type[List | Dict]) -> Handler:
    def handle(machine: Machine, position: int) -> int:
        machine.containers += 1
        machine.stack.append(kind(_NO_MEMBERS, _NO_STARTS))
        machine.starts.append(position)
        return position + 1

    return handle


HANDLERS: Final[dict[int, Handler]] = {
    ord("]"): _empty(List),
    ord("}"): _empty(Dict),
    0x94: _memoize,
    ord("q"): _put(2),
    ord("r"): _put(5),
    ord("h"): _get(GET_BYTES),
    ord("j"): _get(LONG_GET_BYTES),
    ord("p"): _other,
    ord("g"): _other,
}
