from __future__ import annotations

import pytest

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret

MISFIT = "an operation that does not fit the stack"
UNREADABLE = "an invalid argument"
PAST = "an argument reaches past the end"


@pytest.mark.parametrize(
    ("data", "detail", "offset"),
    [
        (b"", "it ends before STOP", 0),
        (b"N", "it ends before STOP", 1),
        (b"N\xff.", "no such opcode 0xff", 1),
        (b"K", PAST, 0),
        (b"M\x01", PAST, 0),
        (b"J\x01\0", PAST, 0),
        (b"G\0\0", PAST, 0),
        (b"I12", PAST, 0),
        (b"U\x05ab.", PAST, 0),
        (b"X\x05\0\0\0ab.", PAST, 0),
        (b"\x8b\xff\xff\xff\xffab.", PAST, 0),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\xffab.", PAST, 0),
        (b"cos\nsystem", PAST, 0),
        (b"N\x82", PAST, 1),
        (b"N\x84\0\0", PAST, 1),
        (b"N\x80", PAST, 1),
        (b"Nr\0", PAST, 1),
        (b"Nq", PAST, 1),
        (b"Nh", PAST, 1),
        (b"P1", PAST, 0),
        (b".", "STOP with more or less than one value", 0),
        (b"NN.", "STOP with more or less than one value", 2),
        (b"N(.", "STOP with more or less than one value", 2),
        (b"(N.", "STOP with more or less than one value", 2),
        (b"h\x05.", "a memo index that was never set", 0),
        (b"j\x05\0\0\0.", "a memo index that was never set", 0),
        (b"g-1\n.", "a memo index that was never set", 0),
        (b"Np0\n0g-1\n.", "a memo index that was never set", 5),
        (b"Nq\x050h\x04.", "a memo index that was never set", 4),
        (b"Nq\x050j\x04\0\0\0.", "a memo index that was never set", 4),
        (b"gx\n.", UNREADABLE, 0),
        (b"Np-1\n.", "a negative memo index", 1),
        (b"X\x01\0\0\0\xff.", "a string that is not UTF-8", 0),
        (b"c\xff\nx\n.", "a string that is not UTF-8", 0),
        (b"\x80\x06N.", "unknown protocol 6 (pickle has 0 to 5)", 0),
        (b"\x95\xff\0\0\0\0\0\0\0N.", "a frame reaches past the end", 0),
        (b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN.", "a frame reaches past the end", 0),
        (b"Ione\n.", UNREADABLE, 0),
        (b"I" + b"1" * 10_000 + b"\n.", UNREADABLE, 0),
        (b"L" + b"1" * 10_000 + b"L\n.", UNREADABLE, 0),
        (b"Fone\n.", UNREADABLE, 0),
        (b"Scpu\n.", UNREADABLE, 0),
        (b"S'\n.", UNREADABLE, 0),
        (b"S'cpu\"\n.", UNREADABLE, 0),
        (b"q\0.", MISFIT, 0),
        (b"r\0\0\0\0.", MISFIT, 0),
        (b"\x94.", MISFIT, 0),
        (b"2.", MISFIT, 0),
        (b"0.", MISFIT, 0),
        (b"1.", MISFIT, 0),
        (b"(Nq\x00(h\x00h\x01tt.", "a memo index that was never set", 7),
        (b"R.", MISFIT, 0),
        (b"N\x81.", MISFIT, 1),
        (b"NN\x92.", MISFIT, 2),
        (b"b.", MISFIT, 0),
        (b"Nb.", MISFIT, 1),
        (b"Q.", MISFIT, 0),
        (b"(o.", MISFIT, 1),
        (b"o.", MISFIT, 0),
        (b"iapp\nf\n.", MISFIT, 0),
        (b"t.", MISFIT, 0),
        (b"\x85.", MISFIT, 0),
        (b"N\x86.", MISFIT, 1),
        (b"NN\x87.", MISFIT, 2),
        (b"N(\x85.", MISFIT, 2),
        (b"a.", MISFIT, 0),
        (b"]a.", MISFIT, 1),
        (b"NNa.", MISFIT, 2),
        (b"}Na.", MISFIT, 2),
        (b"N(Ne.", MISFIT, 3),
        (b"s.", MISFIT, 0),
        (b"}Ns.", MISFIT, 2),
        (b"]NNs.", MISFIT, 3),
        (b"](NNu.", MISFIT, 4),
        (b"}(Nu.", "a key without a value", 3),
        (b"(Nd.", "a key without a value", 2),
        (b"K\x01X\x02\0\0\0os\x93.", "STACK_GLOBAL without two strings", 9),
        (b"X\x02\0\0\0osK\x01\x93.", "STACK_GLOBAL without two strings", 9),
        (b"X\x02\0\0\0os\x93.", MISFIT, 7),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_place_in_the_pickle(data, detail, offset):
    for before in (b"", b"before"):
        with pytest.raises(DamagedPickle) as caught:
            interpret(before + data, Limits(), len(before))
        assert (caught.value.detail, caught.value.offset) == (detail, offset)
        assert caught.value.message == f"damaged pickle: {detail} at byte {offset}"


LONG = b"x" * 20
STRINGS = {
    "BINUNICODE": b"X\x14\0\0\0" + LONG,
    "SHORT_BINUNICODE": b"\x8c\x14" + LONG,
    "BINBYTES8": b"\x8e\x14\0\0\0\0\0\0\0" + LONG,
    "LONG1": b"\x8a\x14" + LONG,
    "STRING": b"S'" + LONG[2:] + b"'\n",
    "UNICODE": b"V" + LONG + b"\n",
    "INT": b"I" + b"1" * 20 + b"\n",
    "GLOBAL": b"c" + LONG + b"\nx\n",
    "GLOBAL's name": b"cx\n" + LONG + b"\n",
    "PERSID": b"P" + LONG + b"\n",
    "PUT": b"Np" + b"0" * 20 + b"\n",
}


@pytest.mark.parametrize("name", STRINGS)
def test_a_string_may_be_as_large_as_the_limit_and_no_larger(name):
    data = STRINGS[name] + b"."
    assert interpret(data, Limits(string_bytes=20)).end == len(data)
    with pytest.raises(LimitExceeded) as caught:
        interpret(data, Limits(string_bytes=19))
    assert "string" in caught.value.resource
    assert (caught.value.limit, caught.value.actual) == (19, 20)


@pytest.mark.parametrize(("operation", "length"), [(b"r%b", 11), (b"p%d\n", 12)])
def test_an_index_of_the_memo_goes_so_far_beyond_the_bytes_and_no_farther(operation, length):
    def stored(index: int) -> bytes:
        argument = index.to_bytes(4, "little") if operation == b"r%b" else index
        return b"](K\x01" + operation % argument + b"1."

    most = 4096 + len(stored(4106))
    assert interpret(stored(most), Limits()).end == len(stored(most)) == length
    assert interpret(stored(most + 1), Limits(factor=2)).end == length
    with pytest.raises(LimitExceeded) as caught:
        interpret(stored(most + 1), Limits())
    assert "memo" in caught.value.resource
    assert (caught.value.limit, caught.value.actual) == (most, most + 1)


def test_operations_are_counted_up_to_the_limit_and_stop_counts():
    assert interpret(b"NNN\x87.", Limits(operations=5)).end == 5
    with pytest.raises(LimitExceeded) as caught:
        interpret(b"NNN\x87.", Limits(operations=4))
    assert caught.value.message == "the file exceeds the limit on pickle operations: 5 > 4"


def test_as_many_marks_as_the_limit_may_be_open():
    data = b"(" * 7 + b"t" * 7 + b"."
    assert interpret(data, Limits(depth=7)).end == len(data)
    with pytest.raises(LimitExceeded) as caught:
        interpret(data, Limits(depth=6))
    assert "depth" in caught.value.resource
    assert (caught.value.limit, caught.value.actual) == (6, 7)


def test_a_pickle_may_be_as_large_as_the_limit_and_no_larger():
    assert interpret(b"before]N\x86.", Limits(pickle_bytes=4), 6).end == 10
    with pytest.raises(LimitExceeded) as caught:
        interpret(b"before]N\x86.", Limits(pickle_bytes=3), 6)
    assert "size of a pickle" in caught.value.resource
    assert (caught.value.limit, caught.value.actual) == (3, 4)


NESTS = {
    "tuples": b"N" + b"\x85" * 40_000,
    "lists": b"]" * 20_000 + b"a" * 19_999,
    "dicts": b"}" + b"N}" * 30_000 + b"s" * 30_000,
    "calls": b"ca\nb\n" + b")R" * 20_000,
    "persistent ids": b"N" + b"Q" * 40_000,
}


@pytest.mark.parametrize("name", NESTS)
def test_a_nest_is_refused_where_it_becomes_too_deep(name) -> None:
    with pytest.raises(LimitExceeded) as caught:  # the rest of it is not read, and is damaged
        interpret(b"\x80\x02" + NESTS[name] + b"\xff", Limits())
    assert "depth" in caught.value.resource


@pytest.mark.parametrize("code", [b"]" * 40_000 + b"0" * 39_999, b"(" + b"N" * 40_000 + b"t", b"N0" * 20_000 + b"N"])
def test_many_values_are_no_nest(code) -> None:
    assert interpret(b"\x80\x02" + code + b".", Limits(depth=3)).foreign is not None


def test_a_tree_that_takes_much_more_memory_than_its_pickle_is_refused():
    with pytest.raises(LimitExceeded) as caught:
        interpret(b"(" + b"]" * 100 + b"t.", Limits(tree_bytes=1000))
    assert caught.value.limit == 1000
