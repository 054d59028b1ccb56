"""Names after an operation at which the machine stops, and pickle.load may not."""

from __future__ import annotations

import os
import pickle
import struct

import pytest

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret

HARMLESS = os.getpid.__module__ + ".getpid"
CALL = b"cposix\ngetpid\n)R0N."
#: Operations that the machine calls damage, and the unpickler in C reads.
READ_IN_C = [b"]NaK\x00Ns0", b"N(e0", b"N(u0", b"N(\x900", b")(e0", b"}(e0", b"I010\n0", b"I5\0junk\n0"]


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word.encode()


@pytest.mark.parametrize("before", READ_IN_C)
def test_what_the_unpickler_in_c_would_run_is_named(before):
    assert pickle.loads(before + CALL) is None
    with pytest.raises(DamagedPickle) as caught:
        interpret(before + CALL, Limits())
    assert caught.value.runs == (HARMLESS,)


@pytest.mark.parametrize(
    "before", [b"Nr\x40\x42\x0f\x000", b"(" * 20_000 + b"1" * 20_000], ids=["a far index", "many marks"]
)
def test_a_limit_names_what_follows(before):
    assert pickle.loads(before + CALL) is None
    with pytest.raises(LimitExceeded) as caught:
        interpret(before + CALL, Limits())
    assert caught.value.runs == (HARMLESS,)


def test_a_limit_on_operations_names_what_follows():
    with pytest.raises(LimitExceeded) as caught:
        interpret(b"N0" * 20 + CALL, Limits(operations=16))
    assert caught.value.runs == (HARMLESS,)


@pytest.mark.parametrize(
    "imports",
    [
        text("posix") + text("getpid") + b"\x93",
        b"\x8c\x05posix\x8c\x06getpid\x93",
        b"Vposix\nS'getpid'\n\x93",
        text("posix") + b"q\x05" + text("getpid") + b"q\x0600h\x05h\x06\x93",
        text("posix") + b"p5\n" + text("getpid") + b"r\x06\0\0\x0000g5\nj\x06\0\0\0\x93",
        text("posix") + b"\x94" + text("getpid") + b"\x9400h\x00h\x01\x93",
    ],
)
def test_names_of_two_texts(imports):
    with pytest.raises(DamagedPickle) as caught:
        interpret(b"\x80\x04N(e0" + imports + b")R.", Limits())
    assert caught.value.runs == (HARMLESS,)


def test_texts_from_before_the_damage_are_known():
    data = b"\x80\x04" + text("posix") + b"\x940" + text("getpid") + b"\x940N(e0h\x00h\x01\x93)R."
    with pytest.raises(DamagedPickle) as caught:
        interpret(data, Limits())
    assert caught.value.runs == (HARMLESS,)


@pytest.mark.parametrize(
    ("after", "runs"),
    [
        (b"cmine\nrun\n)R.", ("mine.run",)),  # a function of another package counts if it is called
        (b"cmine\nrun\n.", ()),
        (b"cmine\nNet\n)R.", ()),
        (b"c\xff\xfe\nrun\n)R.", ()),  # no name
        (b"h\x09g99999999999999999999999999\n\x94\x93)R.", ()),
        (b"\xff" + CALL, ()),  # real damage: the unpickler stops too
    ],
)
def test_what_counts(after, runs):
    with pytest.raises(DamagedPickle) as caught:
        interpret(b"N(e0" + after, Limits())
    assert caught.value.runs == runs
