from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmove.errors import DamagedPickle
from ckptmove.model import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import WEIGHTS_ONLY_OPCODES
from ckptmove.pickles.tree import Call, Dict, Global, List, Node, Opaque, Persistent, Set, Tuple

LIMITS = Limits()
EXAMPLES = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])

Point = namedtuple("Point", "x y")  # noqa: PYI024  the untyped one is what old checkpoints hold


class Plain:
    pass


class Slotted:
    __slots__ = ("left", "right")

    def __getstate__(self):
        return None, {"left": self.left, "right": self.right}


class Reduced:
    def __reduce__(self):
        return (Reduced, (), {"inner": getattr(self, "inner", None)})


class Items(list):
    pass


class Pairs(OrderedDict):
    pass


class Window(deque):
    pass


class Keyword:
    def __new__(cls, *, name="", size=0):
        self = super().__new__(cls)
        self.name, self.size = name, size
        return self

    def __getnewargs_ex__(self):
        return (), {"name": self.name, "size": self.size}


class Stateful:
    def __init__(self):
        self.held = None

    def __getstate__(self):
        return [self.held]

    def __setstate__(self, state):
        self.held = state[0]


TEXT = st.text(st.characters(exclude_categories=()), max_size=9) | st.sampled_from(
    ["", "cpu", "\ud800", "😀", "a\nb\\u0041"]
)
NUMBERS = (
    st.integers()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 255, 256, 65535, 65536, 2**31, -(2**31), 2**2100])
)
HASHABLE = st.none() | st.booleans() | NUMBERS | TEXT | st.binary(max_size=300)
ATOMS = HASHABLE | st.floats() | st.binary(max_size=9).map(bytearray) | st.complex_numbers(allow_nan=False)
GLOBALS = st.sampled_from([OrderedDict, deque, int, len, Plain, Point])


KINDS = ["list", "tuple", "dict", "set", "frozenset", "ordered", "deque", "items", "object"]


@st.composite
def graphs(draw) -> Any:
    """Objects that share and contain one another, cycles included."""
    made: list[Any] = [draw(ATOMS)]
    mutable: list[list[Any]] = []
    for _ in range(draw(st.integers(0, 8))):
        members = st.lists(ATOMS | st.sampled_from(made) | st.sampled_from(made) | GLOBALS, max_size=4)
        kind = draw(
            st.sampled_from(["list", "tuple", "dict", "set", "frozenset", "ordered", "deque", "items", "object"])
        )
        made.append(_make(kind, draw(members), draw(st.lists(HASHABLE, min_size=4, max_size=4))))
        if type(made[-1]) is list:
            mutable.append(made[-1])
    for target in mutable:
        target.extend(draw(st.lists(st.sampled_from(made), max_size=2)))
    return made if draw(st.booleans()) else made[-1]


def _make(kind: str, members: list[Any], keys: list[Any]) -> Any:
    if kind in {"set", "frozenset"}:
        return {"set": set, "frozenset": frozenset}[kind](keys[: len(members)])
    if kind in {"dict", "ordered"}:
        return {"dict": dict, "ordered": Pairs}[kind](zip(keys, members, strict=False))
    if kind == "deque":
        return Window(members, maxlen=9)
    if kind == "object":
        return _instance(members)
    return {"list": list, "tuple": tuple, "items": Items}[kind](members)


def _instance(members: list[Any]) -> Any:
    if not members:
        return Keyword(name="n", size=3)
    made: Any = [Plain, Slotted, Reduced, Stateful][len(members) - 1]()
    if isinstance(made, Slotted):
        made.left, made.right = members
    elif isinstance(made, Stateful):
        made.held = members
    else:
        made.inner = members
    return Point(made, members[0])


def dumped(value: Any, protocol: int, style: str) -> bytes:
    if style == "python":
        out = io.BytesIO()
        pickle._Pickler(out, protocol).dump(value)
        return out.getvalue()
    data = pickle.dumps(value, protocol)
    return pickletools.optimize(data) if style == "optimized" else data


PICKLES = {"protocol": st.integers(0, 5), "style": st.sampled_from(["c", "python", "optimized"])}


@EXAMPLES
@given(value=graphs(), **PICKLES)
def test_the_tree_stands_for_what_pickle_loads(value, protocol, style, evaluate, same):
    data = dumped(value, protocol, style)
    machine = interpret(data, LIMITS)
    assert same(evaluate(machine.root), pickle.loads(data))
    assert (machine.begin, machine.end, machine.protocol) == (0, len(data), protocol if protocol >= 2 else 0)


SOURCES = {
    Global: b"c\x93",
    Tuple: b"t)\x85\x86\x87",
    List: b"]l",
    Set: b"\x8f\x91",
    Dict: b"}d",
    Call: b"R\x81\x92",
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
STRINGS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}


@EXAMPLES
@given(value=graphs(), **PICKLES)
def test_each_start_is_the_operation_that_pushed_the_value(value, protocol, style, nodes):
    data = dumped(value, protocol, style)
    machine = interpret(data, LIMITS)
    for found, start in nodes(machine.root)[1:]:
        opcode, argument, _ = next(pickletools.genops(data[start:]))
        if "GET" in opcode.name:
            assert machine.memo[int(argument)] is found
        elif isinstance(found, Node):
            assert data[start] in SOURCES[type(found)]
        else:
            argument = CONSTANTS.get(opcode.name, argument)
            pushed = bytes(argument) if isinstance(argument, bytearray) else argument
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


@EXAMPLES
@given(value=graphs(), before=st.binary(max_size=9), after=st.binary(max_size=9), **PICKLES)
def test_reads_globals_frames_and_foreign_opcodes_are_noted_wherever_the_pickle_lies(
    value, before, after, protocol, style
):
    data = dumped(value, protocol, style)
    machine = interpret(before + data + after, LIMITS, len(before))
    shift = len(before)
    reads, names, frames, foreign = expected_notes(data)
    assert machine.reads == [(read + shift, defined + shift) for read, defined in reads]
    assert machine.globals == {name: start + shift for name, start in names.items()}
    assert machine.frames == [start + shift for start in frames]
    assert machine.foreign == {code: start + shift for code, start in foreign.items()}
    assert (machine.begin, machine.end) == (shift, shift + len(data))


@EXAMPLES
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


PYTHON2 = {
    "integers": b"(lp0\nI10\naI-3\naI01\naI00\naL12345678901234567890L\naL-1\naI0x1f\na.",
    "strings": b"(S'cpu'\nS\"it's\"\nS'\\x41\\101\\n\\\\\\'\\q'\nV\\u20ac\\ud800\nt.",
    "every escape": b"S'" + b"".join(b"\\" + bytes([code]) for code in b"abfnrtv'\"\\") + b"\\7\\07\\007'\n.",
    "floats": b"(F1.5\nF-inf\nFnan\nt.",
    "binary strings": b"(U\x03cpuT\x03\x00\x00\x00cpuU\x02\xc3\xa9t.",
    "a dict": b"(dp0\nS'a'\np1\nI1\nsS'b'\ng1\ns.",
    "a marked dict": b"(S'a'\nI1\nS'b'\nNd.",
    "instance": b"(ccollections\nOrderedDict\no.",
    "instance by name": b"(icollections\nOrderedDict\np0\n.",
    "instance with arguments": b"((lI1\naicollections\ndeque\n.",
    "duplicate": b"]2\x86.",
    "pop": b"]N0N(NN10K\x01a.",
    "pop of a mark": b"](0.",
    "old module names": b"c__builtin__\nset\n(]K\x01atR.",
    "set": b"\x80\x04\x8f(K\x01K\x02\x90.",
    "long strings": b"\x80\x04(\x8d\x01\0\0\0\0\0\0\0a\x8e\x01\0\0\0\0\0\0\0b\x96\x01\0\0\0\0\0\0\0ct.",
    "long integers": b"(\x8a\x00\x8a\x02\xff\x00\x8b\x02\x00\x00\x00\x00\xfft.",
    "a second put": b"]p0\n]K\x01ap0\ng0\n\x87.",
    "memoize counts": b"\x80\x04]\x94r\x09\0\0\0]\x94j\x02\0\0\0\x87.",
    "a key twice": b"}(K\x01K\x02K\x01K\x03u.",
    "spaces": b"I 7 \n.",
}


@pytest.mark.parametrize("name", PYTHON2)
@pytest.mark.filterwarnings("ignore:invalid escape")
def test_pickles_by_hand_stand_for_what_pickle_loads(name, evaluate, same):
    data = PYTHON2[name]
    assert same(evaluate(interpret(data, LIMITS).root), pickle.loads(data, encoding="utf-8"))


def test_python2_bytes_that_are_not_utf8_stay_visible():
    assert interpret(b"U\x02\xff0.", LIMITS).root == "\\xff0"
    assert interpret(b"S'\\xff'\n.", LIMITS).root == "\\xff"


def test_a_duplicate_is_a_read_of_what_pushed_the_top():
    machine = interpret(b"(X\x01\0\0\0ap5\n2h\x052t.", LIMITS)
    assert machine.reads == [(10, 1), (11, 1), (13, 11)]
    assert (machine.memo, machine.memo_starts) == ({5: "a"}, {5: 1})


def test_an_index_that_held_a_string_and_then_a_list_is_not_a_read():
    machine = interpret(b"(X\x01\0\0\0aq\x05]q\x05h\x05t.", LIMITS)
    assert machine.reads == []


@pytest.mark.parametrize("pushes", [b"X\x03\0\0\0cpu", b"V cpu\n", b"cos\nsystem\n"])
@pytest.mark.parametrize("put", [b"q\x05", b"r\x05\0\0\0", b"p5\n"])
@pytest.mark.parametrize("get", [b"h\x05", b"j\x05\0\0\0", b"g5\n"])
def test_every_put_and_get_makes_a_read(pushes, put, get):
    machine = interpret(b"(" + pushes + put + get + b"t.", LIMITS)
    assert machine.reads == [(1 + len(pushes) + len(put), 1)]


def test_persistent_ids_of_both_kinds():
    line = interpret(b"P17\n.", LIMITS).root
    assert type(line) is Persistent
    assert (line.pid, line.pid_start) == ("17", 0)
    binary = interpret(b"(K\x11K\x12tQ.", LIMITS).root
    assert type(binary) is Persistent
    assert type(binary.pid) is Tuple
    assert (binary.pid.items, binary.pid.starts, binary.pid_start) == ([17, 18], [1, 3], 5)


def test_extensions_and_buffers_are_opaque():
    machine = interpret(b"(\x82\x05\x83\x05\x01\x84\x05\0\0\x01\x97\x98t.", LIMITS)
    assert type(machine.root) is Tuple
    assert [item.description for item in machine.root.items if type(item) is Opaque] == [
        "copyreg extension 5",
        "copyreg extension 261",
        "copyreg extension 16777221",
        "out-of-band buffer",
    ]
    assert machine.globals == {
        "copyreg.extension.5": 1,
        "copyreg.extension.261": 3,
        "copyreg.extension.16777221": 6,
    }


def test_calls_keep_their_parts_and_starts():
    made = interpret(b"cos\nsystem\n)}\x92}b(K\x01e(K\x02K\x03u.", LIMITS).root
    assert type(made) is Call
    assert made.name == "os.system"
    assert type(made.args) is Tuple
    assert (made.args.items, made.args_start) == ([], 11)
    assert type(made.kwargs) is Dict
    assert (type(made.state), made.state_start) == (Dict, 14)
    assert made.appended is not None
    assert made.assigned is not None
    assert (made.appended.items, made.appended.starts) == ([1], [17])
    assert (made.assigned.flat, made.assigned.starts) == ([2, 3], [21, 23])
    nameless = interpret(b"N)R.", LIMITS).root
    assert type(nameless) is Call
    assert nameless.name == ""
    assert (nameless.state, nameless.state_start, nameless.appended, nameless.assigned) == (None, -1, None, None)


@pytest.mark.parametrize("target", [b"]", b"N)R}b"])
def test_a_state_that_has_no_place_of_its_own_hides_nothing(target):
    wrapped = interpret(target + b"X\x01\0\0\0sb.", LIMITS).root
    assert type(wrapped) is Call
    assert (wrapped.func, wrapped.state, wrapped.state_start) == (None, "s", len(target))
    assert isinstance(wrapped.args, List if target == b"]" else Call)
    assert wrapped.args_start == (0 if target == b"]" else 2)


def test_the_collector_is_left_as_it_was():
    import gc

    gc.disable()
    try:
        interpret(b"N.", LIMITS)
        assert not gc.isenabled()
    finally:
        gc.enable()
    interpret(b"N.", LIMITS)
    assert gc.isenabled()
    with pytest.raises(DamagedPickle):
        interpret(b"a.", LIMITS)
    assert gc.isenabled()


def test_a_dict_reads_as_python_does():
    root = interpret(pickle.dumps({"a": 1, 2: math.inf}), LIMITS).root
    assert type(root) is Dict
    assert list(root.keys()) == ["a", 2]
    assert (root.get("a"), root.get("b"), root.get("2")) == (1, None, None)
    twice = interpret(b"}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u.", LIMITS).root
    assert type(twice) is Dict
    assert twice.get("a") == 2
    assert [(key, value) for key, value, _ in twice.pairs()] == [("a", 1), ("a", 2)]
