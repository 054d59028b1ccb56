from __future__ import annotations

import pickle
import pickletools
import zipfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from object_graphs import PICKLES, dumped, graphs

import ckptmove
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import WEIGHTS_ONLY_OPCODES
from ckptmove.pickles.tree import ByteArray, Call, Dict, FrozenSet, Global, List, Node, Set, Tuple

LIMITS = Limits()


@pytest.mark.unmeasured
@given(value=graphs(), **PICKLES)
def test_the_tree_stands_for_what_pickle_loads(value, protocol, style, evaluate, same):
    data = dumped(value, protocol, style)
    machine = interpret(data, LIMITS)
    assert same(evaluate(machine.root), pickle.loads(data))
    assert (machine.begin, machine.end) == (0, len(data))


SOURCES = {
    Global: b"c\x93",
    Tuple: b"t)\x85\x86\x87",
    List: b"]l",
    Set: b"\x8f",
    FrozenSet: b"\x91",
    Dict: b"}d",
    Call: b"R\x81\x92",
}


def memoised_at(data, before, index):
    """The start of the operation whose value the memo has at an index, once the operations before a place have run."""
    memo, last = {}, -1
    for opcode, argument, start in pickletools.genops(data):
        if start >= before:
            break
        if "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else int(argument)] = last
        else:
            last = start
    return memo[index]


CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
STRINGS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}


@pytest.mark.unmeasured
@given(value=graphs(), **PICKLES)
def test_each_start_is_the_operation_that_pushed_the_value(value, protocol, style, nodes):
    data = dumped(value, protocol, style)
    machine = interpret(data, LIMITS)
    held = nodes(machine.root)[1:]
    pushed_at = {start: value for value, start in held}
    for found, start in held:
        opcode, argument, _ = next(pickletools.genops(data[start:]))
        if "GET" in opcode.name:
            assert pushed_at.get(memoised_at(data, start, int(argument)), found) is found
        elif isinstance(found, Node):
            assert data[start] in SOURCES[type(found)]
        else:
            argument = CONSTANTS.get(opcode.name, argument)
            pushed = ByteArray(argument) if isinstance(argument, bytearray) else argument
            assert type(found) is type(pushed)
            assert repr(found) == repr(pushed)


def expected_notes(data: bytes) -> tuple[list[tuple[int, int]], dict[str, int], list[int], dict[int, int]]:
    """Reads, globals, frames and foreign opcodes, out of ``pickletools`` and the habits of Python's picklers."""
    reads, names, frames, foreign = [], {}, [], {}
    memo: dict[int, tuple[int, str | None, bool]] = {}
    strings: list[str] = []
    last = (0, None, False)
    for opcode, argument, position in pickletools.genops(data):
        code = ord(opcode.code)
        if code not in WEIGHTS_ONLY_OPCODES:
            foreign.setdefault(code, position)
        if opcode.name == "FRAME":
            frames.append(position)
        elif "PUT" in opcode.name or opcode.name == "MEMOIZE":
            memo[len(memo) if argument is None else int(argument)] = last
        else:
            text, is_global = argument if opcode.name in STRINGS else None, "GLOBAL" in opcode.name
            if opcode.name == "GLOBAL":
                names.setdefault(argument.replace(" ", "."), position)
            elif opcode.name == "STACK_GLOBAL":
                names.setdefault(".".join(strings[-2:]), position)
            elif "GET" in opcode.name:
                defined, text, is_global = memo[int(argument)]
                if text is not None or is_global:
                    reads.append((position, defined))
            strings += [] if text is None else [text]
            last = (position, text, is_global)
    return reads, names, frames, foreign


@pytest.mark.unmeasured
@given(value=graphs(), before=st.binary(max_size=9), after=st.binary(max_size=9), **PICKLES)
def test_reads_globals_frames_and_foreign_opcodes_are_noted_wherever_the_pickle_lies(
    value, before, after, protocol, style
):
    data = dumped(value, protocol, style)
    machine = interpret(before + data + after, LIMITS, len(before))
    shift = len(before)
    reads, names, frames, foreign = expected_notes(data)
    assert list(machine.reads) == [start + shift for pair in reads for start in pair]
    assert machine.globals == {name: start + shift for name, start in names.items()}
    assert machine.frames == [start + shift for start in frames]
    assert machine.foreign == {code: start + shift for code, start in foreign.items()}
    assert (machine.begin, machine.end) == (shift, shift + len(data))


@pytest.mark.unmeasured
@given(value=graphs(), before=st.binary(max_size=9), protocol=st.integers(0, 5))
def test_a_pickle_at_an_offset_stands_for_the_same(value, before, protocol, evaluate, same):
    data = pickle.dumps(value, protocol)
    machine = interpret(before + data + b"after", LIMITS, len(before))
    assert same(evaluate(machine.root), pickle.loads(data))


def test_a_large_frame_and_strings_outside_of_frames(evaluate):
    value = ["x" * 70_000, b"y" * 70_000, *map(str, range(20_000))]
    for style in ("c", "python"):
        data = dumped(value, 4, style)
        machine = interpret(data, LIMITS)
        assert evaluate(machine.root) == value
        assert machine.frames == expected_notes(data)[2]
        assert len(machine.frames) > 2


def test_shared_values_are_one_node_and_cycles_are_cycles():
    shared = [1]
    loop: list[Any] = [shared, shared, (shared,)]
    loop.append({"me": loop})
    for protocol in range(6):
        root = interpret(pickle.dumps(loop, protocol), LIMITS).root
        assert type(root) is List
        first, second, wrapped, back = root.items
        assert type(wrapped) is Tuple
        assert type(back) is Dict
        assert first is second is wrapped.items[0]
        assert back.get("me") is root


def test_a_recursive_tuple_is_itself():
    loop: tuple[list[Any]] = ([],)
    loop[0].append(loop)
    for protocol in range(6):
        root = interpret(pickle.dumps(loop, protocol), LIMITS).root
        assert type(root) is Tuple
        assert type(root.items[0]) is List
        inner = root.items[0].items[0]
        assert type(inner) is Tuple
        assert inner.items[0] is root.items[0]


def test_a_tensor_made_from_an_unknown_call_is_an_object(tmp_path) -> None:
    """``Parameter(my_package.make())``: only a run of the call shows the tensor."""
    path = tmp_path / "made.pt"
    made = b"\x80\x02ctorch._utils\n_rebuild_parameter\ncmy_package\nmake\n)R\x88}\x87R."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", made)
        archive.writestr("a/version", "3")
    found = ckptmove.inspect(path)
    assert found.inventory.tensors == ()
    assert [finding.code for finding in found.findings] == ["S701", "S702"]


def test_a_tuple_that_is_repeated_is_remembered():
    machine = interpret(b"\x80\x02K\x01\x852\x86.", Limits())
    assert [value.items for value in machine.reread.values()] == [(1,)]


def test_names_before_the_damage_of_another_pickle_are_noted():
    machine = interpret(b"N.", Limits())
    machine.note_runs(("os.system",))
    assert [*machine.runs] == ["os.system"]
