"""The end of a pickle before other bytes, compared with Python's own reader."""

from __future__ import annotations

import io
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import CkptMoveError, DamagedPickle, LimitExceeded
from ckptmove.io.source import open_source
from ckptmove.limits import Limits
from ckptmove.pickles.stream import read_pickle

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=20,
)


class Counting:
    """The bytes of a file, and how far it was read."""

    path = "x"

    def __init__(self, data, size=None):
        self.data = data
        self.size = len(data) if size is None else size
        self.furthest = 0

    def read(self, start, end):
        assert 0 <= start <= end <= self.size
        self.furthest = max(self.furthest, end)
        return self.data[start:end].ljust(end - start, b"N")


@pytest.mark.unmeasured
@given(tree=TREES, protocol=st.integers(0, 5), before=st.binary(max_size=9), after=st.binary(max_size=9))
def test_it_ends_where_python_ends(tree, protocol, before, after):
    data = before + pickle.dumps(tree, protocol) + after
    stream = io.BytesIO(data)
    stream.seek(len(before))
    pickle.load(stream)
    assert read_pickle(Counting(data), len(before), Limits()) == data[len(before) : stream.tell()]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("tree", [["x" * 70_000, 1.5], ["word"] * 40_000, list(range(70_000)), b"\n" * 200_000])
def test_a_long_one_is_read_piece_by_piece_and_little_beyond(tree, protocol):
    data = pickle.dumps(tree, protocol)
    source = Counting(data + bytes(10_000_000))
    assert read_pickle(source, 0, Limits()) == data
    assert source.furthest <= 2 * len(data) + (1 << 17)


def test_a_real_file(tmp_path):
    (tmp_path / "two.pkl").write_bytes(pickle.dumps([1]) + pickle.dumps([2]))
    source = open_source(str(tmp_path / "two.pkl"))
    first = read_pickle(source, 0, Limits())
    assert (pickle.loads(first), pickle.loads(read_pickle(source, len(first), Limits()))) == ([1], [2])
    source.close()


@pytest.mark.parametrize("protocol", range(6))
def test_cut_anywhere_it_is_damaged(protocol):
    data = pickle.dumps({"key": ["value", 1.5, 7, b"bytes", 10**30]}, protocol)
    for length in range(len(data)):
        with pytest.raises(DamagedPickle) as caught:
            read_pickle(Counting(data[:length]), 0, Limits())
        assert caught.value.offset <= length


def test_an_opcode_that_there_is_not():
    with pytest.raises(DamagedPickle, match="0xff at byte 2"):
        read_pickle(Counting(b"NN\xff."), 0, Limits())


@pytest.mark.parametrize("head", [b"X\xff\xff\xff\xff", b"\x8d" + b"\xff" * 8, b"T\0\0\0\x10"])
def test_a_string_that_claims_more_than_there_is_is_not_waited_for(head):
    source = Counting(head, 1 << 28)
    with pytest.raises(DamagedPickle, match="argument") as caught:
        read_pickle(source, 0, Limits())
    assert caught.value.offset == 0
    assert source.furthest < 1 << 17


@pytest.mark.parametrize(
    ("head", "limits"),
    [
        (b"X" + struct.pack("<I", 2_000_000), Limits(string_bytes=1_000_000)),
        (b"Vno end of line ", Limits(string_bytes=1_000_000)),
        (b"c", Limits(string_bytes=1_000_000)),
        (b"(" * 100, Limits(pickle_bytes=1_000_000)),
    ],
)
def test_the_limits_hold_before_much_is_read(head, limits):
    source = Counting(head, 1 << 40)
    with pytest.raises(LimitExceeded) as caught:
        read_pickle(source, 0, limits)
    assert caught.value.actual > 1_000_000
    assert source.furthest <= 1 << 22


@given(data=st.binary(max_size=60))
def test_only_our_errors_escape(data):
    try:
        found = read_pickle(Counting(data), 0, Limits())
    except CkptMoveError:
        return
    assert data.startswith(found)
    assert found.endswith(b".")
