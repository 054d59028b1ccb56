"""Read a pickle into a tree in one pass, with a symbolic stack machine.

The machine imports nothing and calls nothing. Each operation builds at most a few machine words, so time and memory
grow with the length of the pickle only.

It also records what an edit needs: the start of the operation that pushed each value, the operations that read a
string or a global from the memo, and the start of each frame.
"""

from __future__ import annotations

import struct
from array import array
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Final, NoReturn

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.limits import TREE_MEMORY
from ckptmove.pickles import atoms, memory, structure
from ckptmove.pickles.after_damage import uses_after
from ckptmove.pickles.memory import StopReached
from ckptmove.pickles.scan import GETS, WEIGHTS_ONLY_OPCODES, operation_end
from ckptmove.pickles.state import Machine
from ckptmove.pickles.storage_id import FIELDS
from ckptmove.pickles.tree import Call, Node, Tuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.limits import Limits
    from ckptmove.pickles.state import Handler
    from ckptmove.pickles.tree import Value

#: Operations between two checks of the tree's memory.
_BLOCK: Final = 1 << 14


def _walk(machine: Machine, dispatch: Sequence[Handler]) -> None:
    """Run all operations up to STOP."""
    data = machine.data
    position = machine.begin
    before, rest = machine.excess, machine.limits.operations
    try:
        while rest > 0:
            block = repeat(None, min(_BLOCK, rest))
            rest -= _BLOCK
            for _ in block:
                position = dispatch[data[position]](machine, position)
            _check_memory(machine, position, machine.limits.operations - max(rest, 0), before)
            _check_depth(machine)
        _refuse_more(machine.limits.operations)
    except StopReached as stop:
        machine.end = stop.end
        _check_memory(machine, stop.end, machine.limits.operations - max(rest, 0) - block.__length_hint__(), before)
        machine.root = machine.stack.pop()
        machine.note_given()
        machine.memo, machine.memo_starts = [], array("q")  # no longer needed: seven values for each tensor
        return
    except DamagedPickle as error:
        raise _with_names(error, machine, position) from error
    except LimitExceeded as error:
        machine.note_uses(uses_after(machine, position))
        machine.note_given()
        error.warn(machine.runs)
        raise
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, struct.error) as error:
        # A stack underflow, an unknown memo index, an argument past the end, an item for a value that holds no items.
        damage = DamagedPickle(_explain(error, data, position), offset=position - machine.begin)
        raise _with_names(damage, machine, position) from error


def _refuse_more(operations: int) -> NoReturn:
    raise LimitExceeded("pickle operations", limit=operations, actual=operations + 1)


def _check_memory(machine: Machine, position: int, operations: int, before: int) -> None:
    """Raise LimitExceeded if the tree takes much more memory than its pickle."""
    limits, nbytes, persistents = machine.limits, position - machine.begin, machine.persistents
    new = [node.pid for node in persistents[machine.counted :]]
    machine.storages += sum(type(pid) is Tuple and len(pid.items) >= FIELDS for pid in new)
    machine.counted = len(persistents)
    counts = machine.containers, machine.counted, machine.storages
    machine.excess = before + limits.tree_excess(nbytes, operations, *counts)
    if machine.excess > limits.tree_bytes:
        raise LimitExceeded(TREE_MEMORY, limit=limits.tree_bytes, actual=machine.excess)


def _check_depth(machine: Machine) -> None:
    """Raise LimitExceeded if the top of the stack is nested too deeply, before the rest of it takes memory.

    Only first and last members are followed: other nests take memory until the walk over the tree finds them.
    """
    value, limit = machine.stack[-1] if machine.stack else None, machine.limits.depth
    for _ in range(limit):
        found = _ends(value) if isinstance(value, Node) else ()
        value = next((member for member in found if isinstance(member, Node)), None)
        if value is None:
            return
    raise LimitExceeded("the depth of a pickle", limit=limit, actual=limit + 1)


def _ends(node: Node) -> Sequence[Value]:
    if type(node) is Call:
        return node.assigned, node.appended, node.state, node.func, node.args
    members = node.members()
    return *members[-1:], *members[:1]


def _with_names(error: DamagedPickle, machine: Machine, position: int) -> DamagedPickle:
    """Add the dangerous names before and after the damage to an error."""
    with suppress(DamagedPickle):
        machine.note_uses(uses_after(machine, operation_end(machine.data, position)))
    machine.note_given()
    return DamagedPickle(error.detail, offset=error.offset, runs=(*machine.runs,))


def _explain(error: Exception, data: bytes, position: int) -> str:
    try:
        operation_end(data, position)
    except DamagedPickle as damage:
        return damage.detail
    if data[position] in GETS and isinstance(error, LookupError):
        return "a memo index that was never set"
    if isinstance(error, UnicodeDecodeError):
        return "a string that is not UTF-8"
    if isinstance(error, ValueError):
        return "an invalid argument"
    return "an operation that does not fit the stack"


def interpret_with(data: bytes, limits: Limits, handlers: dict[int, Handler]) -> Machine:
    """Read one pickle as :func:`interpret` does, with other handlers for some opcodes, as a tree that is not edited."""
    _check_size(data, limits)
    machine = Machine(data, limits)
    machine.starts = array("q")
    _walk(machine, _table(_HANDLERS | handlers))
    return machine


def interpret(data: bytes, limits: Limits, begin: int = 0, excess: int = 0) -> Machine:
    """Read the pickle from offset ``begin`` on as data; the ``root`` of the machine after STOP is the tree.

    ``excess`` is the excess memory of the file's other pickles, in bytes.
    """
    _check_size(data, limits, begin)
    machine = Machine(data, limits, begin, excess)
    _walk(machine, _DISPATCH)
    return machine


def _check_size(data: bytes, limits: Limits, begin: int = 0) -> None:
    if len(data) - begin > limits.pickle_bytes:
        raise LimitExceeded("the size of a pickle in bytes", limit=limits.pickle_bytes, actual=len(data) - begin)


def runs_before(data: bytes, limits: Limits) -> tuple[str, ...]:
    """Return the dangerous names in a damaged pickle, up to the damage."""
    try:
        return (*interpret(data, limits).runs,)
    except DamagedPickle as error:
        return error.runs


def _unknown(machine: Machine, position: int) -> int:
    raise DamagedPickle(f"no such opcode 0x{machine.data[position]:02x}", offset=position - machine.begin)


def _recorded(handler: Handler) -> Handler:
    """Record the first use of an opcode that torch's weights-only unpickler rejects, then run its handler."""

    def handle(machine: Machine, position: int) -> int:
        machine.foreign.setdefault(machine.data[position], position)
        return handler(machine, position)

    return handle


def _table(known: Mapping[int, Handler]) -> list[Handler]:
    return [
        known[code] if code in WEIGHTS_ONLY_OPCODES else _recorded(known[code]) if code in known else _unknown
        for code in range(256)
    ]


_HANDLERS = atoms.HANDLERS | structure.HANDLERS | memory.HANDLERS
_DISPATCH = _table(_HANDLERS)
