"""Handlers of the opcodes for the stack, the memo, frames and STOP."""

from __future__ import annotations

import struct
from itertools import repeat
from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.pickles.atoms import line
from ckptmove.pickles.state import UNSET
from ckptmove.pickles.structure import pop_mark
from ckptmove.pickles.tree import Global, Opaque, Tuple

if TYPE_CHECKING:
    from ckptmove.pickles.state import Handler, Machine

_U4: Final = struct.Struct("<I").unpack_from
_U8: Final = struct.Struct("<Q").unpack_from
_HIGHEST_PROTOCOL: Final = 5


class StopReached(Exception):
    """STOP is reached; ``end`` is the offset after it."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


def _next_buffer(machine: Machine, position: int) -> int:
    machine.stack.append(Opaque("out-of-band buffer"))
    machine.starts.append(position)
    return position + 1


def _pop(machine: Machine, position: int) -> int:
    if machine.stack:
        machine.stack.pop()
        machine.starts.pop()
    else:  # as in CPython, POP on an empty stack removes the mark
        pop_mark(machine)
    return position + 1


def _pop_to_mark(machine: Machine, position: int) -> int:
    pop_mark(machine)
    return position + 1


def _duplicate(machine: Machine, position: int) -> int:
    value = machine.stack[-1]
    machine.reads.extend((position, machine.starts[-1]))
    if type(value) is Tuple or isinstance(value, bytes):
        machine.reread[id(value)] = value
    machine.stack.append(value)
    machine.starts.append(position)
    return position + 1


def _store(machine: Machine, index: int) -> None:
    """Store the top of the stack in the memo at any index."""
    memo, starts, value = machine.memo, machine.memo_starts, machine.stack[-1]
    most = machine.limits.max_memo_index(len(machine.data) - machine.begin)
    if index > most:
        raise LimitExceeded("the memo index of a pickle", limit=most, actual=index)
    missing = index + 1 - len(memo)
    if missing > 0:
        memo.extend(repeat(UNSET, missing))
        starts.extend(repeat(-1, missing))
        machine.memo_gaps += missing
    if memo[index] is UNSET:
        machine.memo_gaps -= 1
    memo[index] = value
    starts[index] = machine.starts[-1]


def _binput(machine: Machine, position: int) -> int:
    _store(machine, machine.data[position + 1])
    return position + 2


def _long_binput(machine: Machine, position: int) -> int:
    # A quarter of all operations; nearly all of them use the next index.
    (index,) = _U4(machine.data, position + 1)
    memo = machine.memo
    if index == len(memo):
        memo.append(machine.stack[-1])
        machine.memo_starts.append(machine.starts[-1])
    else:
        _store(machine, index)
    return position + 5


def _put(machine: Machine, position: int) -> int:
    raw, end = line(machine, position)
    index = int(raw)
    if index < 0:
        raise DamagedPickle("a negative memo index", offset=position - machine.begin)
    _store(machine, index)
    return end


def _memoize(machine: Machine, position: int) -> int:
    memo = machine.memo
    if machine.memo_gaps:
        _store(machine, len(memo) - machine.memo_gaps)
    else:
        memo.append(machine.stack[-1])
        machine.memo_starts.append(machine.starts[-1])
    return position + 1


def _recall(machine: Machine, position: int, index: int) -> None:
    value = machine.memo[index]
    if type(value) is str or type(value) is Global:
        reads = machine.reads
        reads.append(position)
        reads.append(machine.memo_starts[index])
    elif type(value) is Tuple or isinstance(value, bytes):
        machine.reread[id(value)] = value
    elif value is UNSET:
        raise KeyError
    machine.stack.append(value)
    machine.starts.append(position)


def _binget(machine: Machine, position: int) -> int:
    # An eighth of all operations: `_recall`, inlined for speed.
    index = machine.data[position + 1]
    value = machine.memo[index]
    if type(value) is str or type(value) is Global:
        reads = machine.reads
        reads.append(position)
        reads.append(machine.memo_starts[index])
    elif type(value) is Tuple or isinstance(value, bytes):
        machine.reread[id(value)] = value
    elif value is UNSET:
        raise KeyError
    machine.stack.append(value)
    machine.starts.append(position)
    return position + 2


def _long_binget(machine: Machine, position: int) -> int:
    _recall(machine, position, _U4(machine.data, position + 1)[0])
    return position + 5


def _get(machine: Machine, position: int) -> int:
    raw, end = line(machine, position)
    index = int(raw)
    if index < 0:
        raise KeyError
    _recall(machine, position, index)
    return end


def _proto(machine: Machine, position: int) -> int:
    protocol = machine.data[position + 1]
    if protocol > _HIGHEST_PROTOCOL:
        raise DamagedPickle(f"unknown protocol {protocol} (pickle has 0 to 5)", offset=position - machine.begin)
    return position + 2


def _frame(machine: Machine, position: int) -> int:
    if position + 9 + _U8(machine.data, position + 1)[0] > len(machine.data):
        raise DamagedPickle("a frame reaches past the end", offset=position - machine.begin)
    machine.frames.append(position)
    return position + 9


def _stop(machine: Machine, position: int) -> int:
    if len(machine.stack) != 1 or machine.marks:
        raise DamagedPickle("STOP with more or less than one value", offset=position - machine.begin)
    raise StopReached(position + 1)


def _readonly_buffer(_: Machine, position: int) -> int:
    """READONLY_BUFFER makes the buffer on top of the stack read-only; its value stays the same."""
    return position + 1


HANDLERS: Final[dict[int, Handler]] = {
    ord("0"): _pop,
    ord("1"): _pop_to_mark,
    ord("2"): _duplicate,
    ord("q"): _binput,
    ord("r"): _long_binput,
    ord("p"): _put,
    0x94: _memoize,
    ord("h"): _binget,
    ord("j"): _long_binget,
    ord("g"): _get,
    0x80: _proto,
    0x95: _frame,
    ord("."): _stop,
    0x97: _next_buffer,
    0x98: _readonly_buffer,
}
