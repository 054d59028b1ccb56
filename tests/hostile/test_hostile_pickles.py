from __future__ import annotations

import copyreg
import io
import pickle
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmove.errors import CkptMoveError, DamagedPickle, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import SHAPE_OF, operations
from ckptmove.pickles.tree import Call, Dict, Sequence
from fuzz.payloads import BODIES, EXTENSIONS, armed, text

# --- nothing is executed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BODIES)
def test_a_payload_that_springs_in_pickle_leaves_no_trace_here(name, trap):
    data = armed(name, str(trap))
    before = set(sys.modules)
    interpret(data, Limits())
    assert not trap.exists()
    assert set(sys.modules) == before

    code = EXTENSIONS.get(name, 1)
    copyreg.add_extension("trap_module", "spring", code)
    try:
        with suppress(Exception):
            pickle.loads(data)
    finally:
        copyreg.remove_extension("trap_module", "spring", code)
        copyreg.clear_extension_cache()
    assert trap.exists(), "the payload is a dud: this test could not fail"


@pytest.mark.parametrize("data", [b"P" + b"trap\n.", text("trap") + b"Q."])
def test_a_persistent_id_is_resolved_by_nobody(data):
    resolved = []

    class Loader(pickle.Unpickler):
        def persistent_load(self, pid):
            resolved.append(pid)

    interpret(data, Limits())
    assert resolved == []
    Loader(io.BytesIO(data)).load()
    assert resolved == ["trap"]


def test_globals_of_a_payload_are_named():
    assert interpret(armed("system", "mark"), Limits()).globals == {"os.system": 2}
    assert interpret(armed("STACK_GLOBAL", ""), Limits()).globals.keys() == {"trap_module.spring"}


# --- damage ----------------------------------------------------------------------------------------------------------

_SAMPLE = {
    "state_dict": OrderedDict(weight=("storage", "cuda:0", 4), bias=[1.5, None, True, 2**80, -3]),
    "set": {1, "a"},
    "bytes": b"\x00\xff" * 3,
    "é😀": frozenset({2.5}),
}
_SHARED = ["cpu", _SAMPLE, _SAMPLE, bytearray(b"abc"), OrderedDict, 3j]
SAMPLES = [pickle.dumps(_SHARED, protocol) for protocol in range(6)] + [armed(name, "mark") for name in BODIES]


def survives(data: bytes, begin: int = 0) -> None:
    """Only our own errors escape, in one line, and no more operations are done than there are bytes."""
    try:
        machine = interpret(data, Limits(operations=len(data) + 1), begin)
    except LimitExceeded as error:
        assert "memo" in error.resource  # noqa: PT017  # not the operations
    except CkptMoveError as error:
        assert "\n" not in str(error)  # noqa: PT017  # any of several errors, or none
    else:
        assert begin < machine.end <= len(data)


@pytest.mark.parametrize("data", SAMPLES)
def test_a_pickle_that_is_cut_anywhere_is_damaged(data):
    for cut in range(len(data)):
        with pytest.raises(DamagedPickle) as caught:
            interpret(data[:cut], Limits())
        assert 0 <= caught.value.offset <= cut
        with pytest.raises(DamagedPickle):
            list(operations(data[:cut]))


#: An example takes a millisecond, so there are four times as many as in the profile.
MANY = settings(max_examples=4 * settings().max_examples)
FLIPS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1)


@pytest.mark.unmeasured
@MANY
@given(data=st.sampled_from(SAMPLES), flips=FLIPS)
def test_flipped_bytes_raise_only_our_errors(data, flips):
    damaged = bytearray(data)
    for place, byte in flips:
        damaged[place % len(data)] = byte
    survives(bytes(damaged))


@MANY
@given(data=st.binary(max_size=200), begin=st.integers(0, 3))
def test_random_bytes_raise_only_our_errors(data, begin):
    survives(data, begin)


@pytest.mark.unmeasured
@MANY
@given(codes=st.lists(st.sampled_from(sorted(SHAPE_OF)), max_size=40), argument=st.binary(min_size=1, max_size=12))
def test_random_operations_raise_only_our_errors(codes, argument):
    survives(b"".join(bytes([code]) + argument[: max(0, SHAPE_OF[code])] for code in codes) + b".")


@MANY
@given(data=st.binary(max_size=60), begin=st.integers(0, 3))
def test_scanning_random_bytes_raises_only_our_errors(data, begin):
    found = []
    with suppress(CkptMoveError):
        found += operations(data, begin)
    assert len(found) <= len(data)


# --- bombs -----------------------------------------------------------------------------------------------------------


def test_a_billion_laughs_are_a_few_shared_nodes():
    data = b"]q\x00" + b"".join(b"(" + b"h%c" % index * 10 + b"lq%c" % (index + 1) for index in range(9))
    # Everything but the last list is left on the stack below it: gather and keep the last.
    root = interpret(b"(" + data + b"t.", Limits()).root
    assert isinstance(root, Sequence)
    assert len(root.items) == 10
    distinct, todo = set(), list(root.items)
    while todo:
        node = todo.pop()
        if isinstance(node, Sequence) and id(node) not in distinct:
            distinct.add(id(node))
            todo += node.items
    assert len(distinct) == 10


#: Several times the possible depth of calls in C: a level needs at least 50 bytes of a stack of 256 KiB.
_DEPTH = 20_000
NESTED = {
    "TUPLE1": b"N" + b"\x85" * _DEPTH + b".",
    "APPEND": b"]" * _DEPTH + b"a" * (_DEPTH - 1) + b".",
    "SETITEM": b"}" + b"N}" * _DEPTH + b"s" * _DEPTH + b".",
    "REDUCE of a call": b"N" + b")R" * _DEPTH + b".",
    "REDUCE of arguments": b"N" * (_DEPTH + 1) + b"R" * _DEPTH + b".",
    "BUILD": b"N" * (_DEPTH + 1) + b"b" * _DEPTH + b".",
    "BINPERSID": b"N" + b"Q" * _DEPTH + b".",
}
_DEEP = """
import gc, pickle, sys, threading
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret

def build_all():
    for name, data in pickle.load(sys.stdin.buffer).items():
        machine = interpret(data, Limits(depth=10**7).times(2))
        del machine
        gc.collect()
        print(name, flush=True)

threading.stack_size(1 << 18)
thread = threading.Thread(target=build_all)
thread.start()
thread.join()
"""


@pytest.mark.unmeasured
def test_a_deep_tree_is_built_and_torn_down_without_recursion():
    # In a process of its own: a stack overflow in C would kill this one.
    done = subprocess.run(
        [sys.executable, "-c", _DEEP], input=pickle.dumps(NESTED), stdout=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stdout.decode().splitlines()) == (0, [*NESTED])


def test_many_marks_are_refused_at_the_limit():
    with pytest.raises(LimitExceeded) as caught:
        interpret(b"(" * 50_000 + b"t" * 50_000 + b".", Limits())
    assert caught.value.actual == Limits().depth + 1


@pytest.mark.parametrize(
    "data",
    [
        b"X\xff\xff\xff\xffabc.",
        b"T\xff\xff\xff\xffabc.",
        b"B\xff\xff\xff\xffabc.",
        b"\x8b\xff\xff\xff\x7fabc.",
        b"\x8d" + b"\xff" * 8 + b"abc.",
        b"\x8e" + b"\xff" * 7 + b"\x7fabc.",
        b"\x96" + b"\x00" * 7 + b"\x80abc.",
        b"\x95" + b"\xff" * 8 + b"N.",
        b"Nr\xff\xff\xff\xff.",
        b"Np" + b"9" * 4000 + b"\n.",
        b"Np-1\n.",
        b"g-1\n.",
        b"I" + b"9" * 10_000 + b"\n.",
        b"L" + b"9" * 10_000 + b"L\n.",
    ],
)
def test_a_huge_figure_is_refused_and_costs_nothing(data):
    tracemalloc.start()
    try:
        with pytest.raises(CkptMoveError):
            interpret(data, Limits())
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    "data",
    [
        b")" * 50_000,
        b"]" * 50_000,
        b"}" * 50_000,
        b"\x8f" * 50_000,
        b"N" + b"2" * 50_000,
        b"N" + b"\x94" * 50_000,
        b"N" + b"\x85" * 50_000,
        b"N" + b")R" * 25_000,
        b"N" + b"Nb" * 25_000,
        b"N" + b"Q" * 50_000,
        b"(" * 9_999,
        b"(1" * 25_000,
        b"cos\nsystem\n" * 5_000,
        b"\x97" * 50_000,
    ],
    ids=lambda data: repr(data[:3]),
)
def test_memory_follows_the_length_of_the_pickle(data):
    tracemalloc.start()
    try:
        with suppress(CkptMoveError):
            interpret(data + b".", Limits())
        assert tracemalloc.get_traced_memory()[1] < 320 * len(data) + 100_000
    finally:
        tracemalloc.stop()


def test_long4_of_a_megabyte_is_an_integer():
    root = interpret(b"\x8b\x00\x00\x10\x00" + b"\x7f" * 2**20 + b".", Limits()).root
    assert isinstance(root, int)
    assert root.bit_length() == 8 * 2**20 - 1


def test_keys_that_python_could_not_hash_are_data():
    root = interpret(b"}(]K\x01}K\x02u.", Limits()).root
    assert isinstance(root, Dict)
    assert [value for _, value, _ in root.pairs()] == [1, 2]


@pytest.mark.parametrize("length", [0, 1, 3, 5, 8, 11])
def test_a_frame_that_lies_within_the_data_is_noted_and_changes_nothing(length):
    data = b"\x80\x04\x95" + length.to_bytes(8, "little") + b"\x8c\x03cpu\x95\x00\0\0\0\0\0\0\0\x85."
    machine = interpret(data, Limits())
    assert machine.frames == [2, 16]
    assert isinstance(machine.root, Sequence)
    assert machine.root.items == ("cpu",)


def test_a_second_stop_is_not_part_of_the_pickle():
    machine = interpret(b"N..", Limits())
    assert (machine.end, machine.root) == (2, None)


def test_a_call_may_be_its_own_argument():
    root = interpret(b"N]q\x00\x85Rq\x01" + b"h\x00h\x01a0.", Limits()).root
    assert type(root) is Call
    assert isinstance(root.args, Sequence)
    inner = root.args.items[0]
    assert isinstance(inner, Sequence)
    assert inner.items[0] is root
