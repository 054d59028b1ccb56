from __future__ import annotations

import pytest

from ckptmove.errors import DamagedPickle
from ckptmove.pickles.scan import operation_end, operations


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (b"N", 1),
        (b"Kx", 2),
        (b"Mxx", 3),
        (b"Jxxxx", 5),
        (b"Gxxxxxxxx", 9),
        (b"I12\n", 4),
        (b"cos\nsystem\n", 11),
        (b"U\x02xx", 4),
        (b"X\x02\0\0\0xx", 7),
        (b"\x8d\x02\0\0\0\0\0\0\0xx", 11),
    ],
)
def test_where_an_operation_ends_and_that_nothing_less_will_do(data, end):
    assert operation_end(data + b"more\n", 0) == end
    assert operation_end(b"at" + data, 2) == end + 2
    for cut in range(len(data)):
        with pytest.raises(DamagedPickle) as caught:
            operation_end(data[:cut], 0)
        assert caught.value.offset == 0
        assert ("argument" if cut else "STOP") in caught.value.detail


@pytest.mark.parametrize("start", [-1, 2, 9])
def test_no_operation_outside_of_the_data(start):
    with pytest.raises(DamagedPickle, match="STOP") as caught:
        operation_end(b"N.", start)
    assert caught.value.offset == start


def test_no_such_opcode_is_named():
    with pytest.raises(DamagedPickle, match="0xff") as caught:
        list(operations(b"N\xff."))
    assert caught.value.offset == 1


def test_a_walk_ends_at_the_first_stop_and_not_without_one():
    assert list(operations(b"N..N")) == [(0, 1, ord("N")), (1, 2, ord("."))]
    for data in (b"", b"N"):
        with pytest.raises(DamagedPickle, match="STOP") as caught:
            list(operations(data))
        assert caught.value.offset == len(data)
