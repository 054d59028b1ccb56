"""A pickle is what ``pickle.load`` reads, or runs before it fails."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import DamagedPickle
from ckptmove.formats.pickle_signature import is_pickle
from ckptmove.io.part import MemorySource

CALL = b"cbuiltins\nexec\n(Vpass\ntR"
#: Bytes that pickle.load runs; the first opcode, the protocol and what follows STOP make no difference.
HOSTILE = {
    "none": b"N0" + CALL + b".",
    "int": b"I1\n0" + CALL + b".",
    "string": b"S'a'\n0" + CALL + b".",
    "frame": b"\x95" + bytes(8) + CALL + b".",
    "memo": b"]\x940" + CALL + b".",
    "protocol 0": b"\x80\x00" + CALL + b".",
    "protocol 1": b"\x80\x01" + CALL + b".",
    "no protocol": CALL + b".",
    "line after it": CALL + b".\n\n",
    "json after it": CALL + b'. {"weight_map": {}}',
    "second": b"I1\n.I2\n.N0" + CALL + b".",
    "gguf": b"GGUF" + bytes(5) + b"0" + CALL + b".",
    "flatbuffer": b"VabcPTMF\n0" + CALL + b".",
    "protocol 4": b"\x80\x04" + CALL + b".",
    "long": b"V" + b"a" * 9000 + b"\n0" + CALL + b".",
    "long text": b"V" + b"a" * (1 << 25) + b"\n0" + CALL + b".",
    "far memo": b"Nr\x00\x00\x10\x000" + CALL + b".",
}
DAMAGED = {"opcode": CALL + b"\xff", "cut": CALL, "stack": CALL + b"0a.", "in the second": b"I1\n." + CALL + b"\xff"}
OTHERS = {
    "text": b"I am text, and go on.\n",
    "word list": b"cast\ncastle\ncat\n",
    "ignored": b"coverage\ndist\n.env\n",
    "release": b"cff-version: 1.2.0\nmessage: x\nauthors:\n",
    "german": b"Nr. 1 und so weiter.\n",
    "month": b"Max. length of a line: 3\n",
    "title": b"COMPILE_FLAGS\n" + b"-" * 66 + b"rce file.\n\nThis",
    "gguf": b"GGUF\x03" + bytes(60),
    "length": b"B\x00\x00\x00\x7fabc",
    "long line": b"V" + b"a" * 9000,
    "long text": b"X\x00\x20\x00\x00" + b"a" * 9000,
    "many": b"N." * 200 + b"!",
}


def is_one(data, **options):
    return is_pickle(MemorySource("x", data), data[:4096], **options)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_pickle_load_runs_is_a_pickle(name):
    assert is_one(HOSTILE[name])


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in {"long text", "far memo"}])
def test_its_names_are_told(tmp_path, name):
    path = tmp_path / "optimizer.pt"
    path.write_bytes(HOSTILE[name])
    assert "S702" in {one.code for one in ckptmove.inspect(path).findings}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_it_runs_before_the_damage_is_told(tmp_path, name):
    assert is_one(DAMAGED[name])
    path = tmp_path / "README.md"
    path.write_bytes(DAMAGED[name])
    if name != "in the second":
        with pytest.raises(DamagedPickle) as caught:
            ckptmove.inspect(path)
        assert caught.value.runs == ("builtins.exec",)


@pytest.mark.parametrize("name", OTHERS)
def test_what_pickle_load_refuses_at_once_is_none(name):
    assert not is_one(OTHERS[name])


@pytest.mark.parametrize("data", [b"I1\n.", b"]q\x00.\n", b"(dp0\nS'a'\nI1\ns." + bytes(9), b"I1\n.I2\n."])
def test_a_value_of_nothing_dangerous_is_a_pickle(data):
    assert is_one(data)


def test_the_start_of_a_longer_file_may_be_a_pickle():
    data = b"(lp0\n" + b"I1\na" * 2000
    assert is_one(data[:4096], is_cut=True)
    assert not is_one(data[:4096])
    assert not is_one(b"no pickle", is_cut=True)


@pytest.mark.slow
def test_no_text_of_this_package_is_one():
    top = Path(ckptmove.__file__).parents[1]
    files = [path for ending in ("py", "md", "json", "toml") for path in top.glob(f"*/**/*.{ending}")][:2000]
    assert len(files) > 400
    assert not [path for path in files if is_one(path.read_bytes())]


def test_few_random_bytes_are_one():
    numbers = random.Random(0)
    found = [data for _ in range(5000) if is_one(data := numbers.randbytes(300))]
    assert len(found) < 5
