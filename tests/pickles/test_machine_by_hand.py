from __future__ import annotations

import gc
import math
import pickle

import pytest

from ckptmove.errors import DamagedPickle
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.tree import Call, Dict, List, Opaque, Persistent, Tuple

LIMITS = Limits()

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
    "memoize counts what is set": b"(Nq\x05K\x01q\x02K\x03q\x02K\x04\x94h\x05h\x02t.",
    "memoize takes what is free": b"(Nq\x02K\x01q\x01K\x03q\x00K\x04\x94h\x00h\x01h\x02h\x03t.",
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
    assert list(machine.reads) == [10, 1, 11, 1, 13, 11]


def test_a_machine_at_rest_has_forgotten_its_memo():
    machine = interpret(b"\x80\x04(\x8c\x02os\x94\x8c\x01a\x94\x93\x94cos\nsystem\n\x94h\x02t.", LIMITS)
    assert (machine.memo, [*machine.memo_starts]) == ([], [])
    first, _, _ = machine.root.items
    assert machine.stacked == {12: first}


def test_an_object_is_appended_and_assigned_to_in_several_batches(evaluate, same):
    appended = b"ccollections\ndeque\n)R(K\x01K\x02e(K\x03eK\x04a."
    assigned = b"ccollections\nOrderedDict\n)R(K\x01K\x02u(K\x03K\x04uK\x05K\x06s."
    for data in (appended, assigned):
        assert same(evaluate(interpret(data, LIMITS).root), pickle.loads(data))


def test_an_index_that_held_a_string_and_then_a_list_is_not_a_read():
    machine = interpret(b"(X\x01\0\0\0aq\x05]q\x05h\x05t.", LIMITS)
    assert list(machine.reads) == []


@pytest.mark.parametrize("pushes", [b"X\x03\0\0\0cpu", b"V cpu\n", b"cos\nsystem\n"])
@pytest.mark.parametrize("put", [b"q\x05", b"r\x05\0\0\0", b"p5\n"])
@pytest.mark.parametrize("get", [b"h\x05", b"j\x05\0\0\0", b"g5\n"])
def test_every_put_and_get_makes_a_read(pushes, put, get):
    machine = interpret(b"(" + pushes + put + get + b"t.", LIMITS)
    assert list(machine.reads) == [1 + len(pushes) + len(put), 1]


def test_persistent_ids_of_both_kinds():
    line = interpret(b"P17\n.", LIMITS).root
    assert type(line) is Persistent
    assert (line.pid, line.pid_start) == ("17", 0)
    binary = interpret(b"(K\x11K\x12tQ.", LIMITS).root
    assert type(binary) is Persistent
    assert type(binary.pid) is Tuple
    assert (binary.pid.items, binary.pid.starts, binary.pid_start) == ((17, 18), (1, 3), 5)


def test_every_persistent_id_is_kept_also_one_that_is_thrown_away():
    machine = interpret(b"(K\x01Q0P2\nK\x03Qt.", LIMITS)
    assert [persistent.pid for persistent in machine.persistents] == [1, "2", 3]


@pytest.mark.parametrize(
    ("pid", "name"),
    [
        (b"(U\x06modulecapp\nNet\nNNt", "app.Net"),
        (b"(U\x06modulecapp\nNet\nU\x01fU\x01st", "app.Net"),
        (b"(U\x07storagecapp\nNet\nNNt", ""),
        (b"(U\x06moduleU\x03NetNNt", ""),
        (b"(U\x06modulet", ""),
        (b"K\x01", ""),
    ],
)
def test_a_module_stands_for_its_class(pid, name):
    call = interpret(pid + b"Q)\x81.", LIMITS).root
    assert type(call.func) is Persistent
    assert call.name == name


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
    assert (made.args.items, made.args_start) == ((), 11)
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


def test_a_global_that_is_written_twice_is_noted_at_its_first_place():
    assert interpret(b"(cos\nsystem\ncos\nsystem\nt.", LIMITS).globals == {"os.system": 1}
