"""Handlers of the opcodes for globals, calls and containers.

A call becomes a node of the tree; nothing is imported or called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.pickles.atoms import constant, end_within, line
from ckptmove.pickles.calls import methods_in_items, methods_in_state, uses_of_append, uses_of_build
from ckptmove.pickles.tree import (
    MADE,
    NEWOBJ,
    NEWOBJ_EX,
    OBJ,
    REDUCE,
    Call,
    Dict,
    FrozenSet,
    Global,
    List,
    Opaque,
    Persistent,
    Set,
    Tuple,
)
from ckptmove.torch_facts.verdicts import COMPUTED

if TYPE_CHECKING:
    from ckptmove.pickles.state import Handler, Machine
    from ckptmove.pickles.tree import Starts, Value


# Shared, as in Python: torch writes at least one empty tuple for each tensor.
_EMPTY_TUPLE: Final = Tuple((), ())


def pop_mark(machine: Machine) -> tuple[list[Value], Starts]:
    """Pop everything above the last mark, with the starts."""
    items, starts = machine.stack, machine.starts
    machine.stack, machine.starts = machine.marks.pop()
    return items, starts


def _two_lines(machine: Machine, position: int) -> tuple[Global, int]:
    module, middle = line(machine, position)
    name, end = line(machine, middle - 1)
    value = Global(module.decode(), name.decode())
    machine.containers += 1
    machine.note_global(value, position)
    return value, end


def _global(machine: Machine, position: int) -> int:
    value, end = _two_lines(machine, position)
    machine.stack.append(value)
    machine.starts.append(position)
    return end


def _stack_global(machine: Machine, position: int) -> int:
    stack = machine.stack
    name, module = stack.pop(), stack.pop()
    del machine.starts[-2:]
    value = machine.stacked[position] = Global(_part(module, machine, position), _part(name, machine, position))
    machine.containers += 1
    machine.note_global(value, position)
    stack.append(value)
    machine.starts.append(position)
    return position + 1


def _part(value: Value, machine: Machine, position: int) -> str:
    """Return the module or the name of a STACK_GLOBAL; a call may compute it, or BUILD on a module replace it."""
    if isinstance(value, (*MADE, Global)):
        return COMPUTED
    if type(value) is not str:
        raise DamagedPickle("STACK_GLOBAL without two strings", offset=position - machine.begin)
    return value


def _inst(machine: Machine, position: int) -> int:
    value, end = _two_lines(machine, position)
    items, starts = pop_mark(machine)
    args = Tuple(tuple(items), tuple(starts))
    machine.containers += 1
    machine.note_call(value, args, OBJ)
    machine.stack.append(Call(value, args, position, OBJ))
    machine.starts.append(position)
    return end


def _obj(machine: Machine, position: int) -> int:
    items, starts = pop_mark(machine)
    args = Tuple(tuple(items[1:]), tuple(starts[1:]))
    machine.note_call(items[0], args, OBJ)
    machine.stack.append(Call(items[0], args, position, OBJ))
    machine.starts.append(position)
    return position + 1


def _reduce(machine: Machine, position: int) -> int:
    stack, starts = machine.stack, machine.starts
    arguments = stack.pop()
    function = stack[-1]
    if type(function) is not Global or not function.is_settled:
        machine.note_call(function, arguments, machine.data[position])
    stack[-1] = Call(function, arguments, starts.pop(), machine.data[position])
    starts[-1] = position
    return position + 1


def _newobj_ex(machine: Machine, position: int) -> int:
    stack, starts = machine.stack, machine.starts
    kwargs, arguments = stack.pop(), stack.pop()
    starts.pop()
    machine.note_call(stack[-1], arguments, NEWOBJ_EX, kwargs)
    call = Call(stack[-1], arguments, starts.pop(), NEWOBJ_EX)
    call.kwargs = kwargs
    stack[-1] = call
    starts[-1] = position
    return position + 1


def _build(machine: Machine, position: int) -> int:
    state = machine.stack.pop()
    start = machine.starts.pop()
    target = machine.stack[-1]
    machine.note_uses(uses_of_build(target))
    machine.given += methods_in_state(state)
    if type(target) is Call and target.state_start < 0:
        target.state = state
        target.state_start = start
    else:
        # No pickler of Python writes this (not a call, or a second state): keep both values in the tree.
        machine.containers += 1
        wrapped = Call(None, target, machine.starts[-1])
        wrapped.state, wrapped.state_start = state, start
        machine.stack[-1] = wrapped
        machine.starts[-1] = position
    return position + 1


def _persistent_line(machine: Machine, position: int) -> int:
    raw, end = line(machine, position)
    value = Persistent(raw.decode("utf-8", "surrogatepass"), position)
    machine.persistents.append(value)
    machine.stack.append(value)
    machine.starts.append(position)
    return end


def _persistent(machine: Machine, position: int) -> int:
    value = machine.stack[-1] = Persistent(machine.stack[-1], machine.starts[-1])
    machine.persistents.append(value)
    machine.starts[-1] = position
    return position + 1


def _extension(width: int) -> Handler:
    def handle(machine: Machine, position: int) -> int:
        end = end_within(machine, position + 1 + width)
        code = int.from_bytes(machine.data[position + 1 : end], "little")
        machine.note_global(Global("copyreg.extension", str(code)), position)
        machine.stack.append(Opaque(f"copyreg extension {code}"))
        machine.starts.append(position)
        return end

    return handle


def _mark(machine: Machine, position: int) -> int:
    marks = machine.marks
    marks.append((machine.stack, machine.starts))
    if len(marks) > machine.limits.depth:
        raise LimitExceeded("the depth of a pickle", limit=machine.limits.depth, actual=len(marks))
    machine.stack = []
    machine.starts = machine.starts[:0]  # a list, or an array in a tree that is not edited
    return position + 1


def _empty(kind: type[List | Set | Dict]) -> Handler:
    def handle(machine: Machine, position: int) -> int:
        machine.containers += 1
        machine.stack.append(kind([], []))
        machine.starts.append(position)
        return position + 1

    return handle


def _marked(kind: type[List | Set]) -> Handler:
    """Handle an opcode that makes a container of everything above the mark."""

    def handle(machine: Machine, position: int) -> int:
        machine.containers += 1
        value = kind(machine.stack, machine.starts)
        machine.stack, machine.starts = machine.marks.pop()
        machine.stack.append(value)
        machine.starts.append(position)
        return position + 1

    return handle


def _marked_tuple(machine: Machine, position: int) -> int:
    value = Tuple(tuple(machine.stack), tuple(machine.starts))
    machine.stack, machine.starts = machine.marks.pop()
    machine.stack.append(value)
    machine.starts.append(position)
    return position + 1


def _marked_dict(machine: Machine, position: int) -> int:
    machine.containers += 1
    value = Dict([], [])
    flat, flat_starts = pop_mark(machine)
    machine.stack.append(value)
    machine.starts.append(position)
    _assign(machine, flat, flat_starts, position)
    return position + 1


def _tuple1(machine: Machine, position: int) -> int:
    machine.containers += 1
    stack, starts = machine.stack, machine.starts
    stack[-1] = Tuple((stack[-1],), (starts[-1],))
    starts[-1] = position
    return position + 1


def _short_tuple(size: int) -> Handler:
    def handle(machine: Machine, position: int) -> int:
        stack, starts = machine.stack, machine.starts
        if len(stack) < size:
            raise IndexError
        value = Tuple(tuple(stack[-size:]), tuple(starts[-size:]))
        del stack[-size:]
        del starts[-size:]
        stack.append(value)
        starts.append(position)
        return position + 1

    return handle


def _append(machine: Machine, position: int) -> int:
    stack, starts = machine.stack, machine.starts
    items, own = [stack.pop()], starts[-1:]
    del starts[-1]
    _extend(machine, items, own)
    return position + 1


def _appends(machine: Machine, position: int) -> int:
    _extend(machine, *pop_mark(machine))
    return position + 1


def _extend(machine: Machine, items: list[Value], starts: Starts) -> None:
    target = machine.stack[-1]
    if type(target) is Call:
        if target.appended is None:
            target.appended = List([], [])
            machine.filled.add(target.name)
        machine.note_uses(uses_of_append(target))
        target = target.appended
    if type(target) is not List and type(target) is not Set:
        raise TypeError
    if target.items:
        target.items += items
        target.starts.extend(starts)
    else:  # most are filled once, without a copy
        target.items, target.starts = items, starts


def _setitem(machine: Machine, position: int) -> int:
    stack, starts = machine.stack, machine.starts
    if len(stack) < 3:  # the dict, a key, a value
        raise IndexError
    flat, flat_starts = stack[-2:], starts[-2:]
    del stack[-2:]
    del starts[-2:]
    _assign(machine, flat, flat_starts, position)
    return position + 1


def _setitems(machine: Machine, position: int) -> int:
    _assign(machine, *pop_mark(machine), position)
    return position + 1


def _assign(machine: Machine, flat: list[Value], starts: Starts, position: int) -> None:
    if len(flat) % 2:
        raise DamagedPickle("a key without a value", offset=position - machine.begin)
    target = machine.stack[-1]
    if type(target) is Call:
        machine.given += methods_in_items(target, flat)
        if target.assigned is None:
            target.assigned = Dict([], [])
            if target.name not in _ASSIGNABLE:
                machine.filled.add(target.name)
        target = target.assigned
    if type(target) is not Dict:
        raise TypeError
    if target.flat:
        target.flat += flat
        target.starts.extend(starts)
    else:
        target.flat, target.starts = flat, starts


#: From torch/_weights_only_unpickler.py ``_check_set_item_target``, since torch 2.10; a dict has its own opcode.
_ASSIGNABLE: Final = frozenset({"collections.OrderedDict", "collections.Counter"})

HANDLERS: Final[dict[int, Handler]] = {
    ord("c"): _global,
    0x93: _stack_global,
    ord("i"): _inst,
    OBJ: _obj,
    REDUCE: _reduce,
    NEWOBJ: _reduce,
    NEWOBJ_EX: _newobj_ex,
    ord("b"): _build,
    ord("P"): _persistent_line,
    ord("Q"): _persistent,
    0x82: _extension(1),
    0x83: _extension(2),
    0x84: _extension(4),
    ord("("): _mark,
    ord(")"): constant(_EMPTY_TUPLE),
    ord("]"): _empty(List),
    0x8F: _empty(Set),
    ord("}"): _empty(Dict),
    ord("t"): _marked_tuple,
    ord("l"): _marked(List),
    ord("d"): _marked_dict,
    0x91: _marked(FrozenSet),
    0x85: _tuple1,
    0x86: _short_tuple(2),
    0x87: _short_tuple(3),
    ord("a"): _append,
    ord("e"): _appends,
    0x90: _appends,  # ADDITEMS
    ord("s"): _setitem,
    ord("u"): _setitems,
}
