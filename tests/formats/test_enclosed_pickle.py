"""A pickle inside of a numpy array or a compressed file: its dangerous names, and nothing else, are told."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import sys
import zlib

import numpy as np
import pytest
import torch

import ckptmove
from ckptmove.errors import NotACheckpoint
from ckptmove.formats.enclosed_pickle import decompressed
from ckptmove.formats.opening import recognise
from ckptmove.io.part import MemorySource


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def array(value, **options):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(value), **options)
    return stream.getvalue()


def objects(*values):
    return array(np.array([*values, None], dtype=object))


def torch_inside():
    stream = io.BytesIO()
    torch.save(Evil(), stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


SYSTEM = (f"{os.system.__module__}.system",)
PICKLE = b"N0cbuiltins\nexec\n(Vpass\ntR."
EVIL = objects(Evil())
#: The names that are told; None for a file without a pickle.
FILES = {
    "array": (EVIL, SYSTEM),
    "array of version 2": (array(np.array([Evil(), None], dtype=object), version=(2, 0)), SYSTEM),
    "long array": (objects("a" * 100_000, Evil()), SYSTEM),
    "array in an escape": (EVIL.replace(b"'|O'", b"'\\x4f'").replace(b"   \n", b" \n"), SYSTEM),
    "array of a dtype by name": (EVIL.replace(b"'|O'", b"'object'").replace(b"    \n", b"\n"), SYSTEM),
    "cut array": (EVIL[:-1], SYSTEM),
    "array of words": (objects("word"), ()),
    "array of numbers": (array([1.0, 2.0]), None),
    "array without items": (array(np.array([], dtype="O"))[:128], None),
    "array of objects without pickle": (EVIL[:128] + b"none", None),
    "cut header": (EVIL[:9], None),
    "signature": (EVIL[:6], None),
    "gzip": (gzip.compress(PICKLE), ("builtins.exec",)),
    "bzip2": (bz2.compress(PICKLE), ("builtins.exec",)),
    "xz": (lzma.compress(PICKLE), ("builtins.exec",)),
    "zlib": (zlib.compress(PICKLE), ("builtins.exec",)),
    "torch in gzip": (gzip.compress(torch_inside()), SYSTEM),
    "long pickle in gzip": (gzip.compress(PICKLE[:-1] + b"V" + b"a" * 1_000_000 + b"\n0N."), ("builtins.exec",)),
    "harmless in gzip": (gzip.compress(b"(lp0\n."), ()),
    "text in gzip": (gzip.compress(b"hello"), None),
    "text in xz": (lzma.compress(b"hello"), None),
    "large dictionary": (lzma.compress(PICKLE, preset=9), None),
    "broken bzip2": (b"BZh9" + bytes(20), None),
    "broken xz": (b"\xfd7zXZ\x00" + bytes(20), None),
}


@pytest.mark.parametrize("name", FILES)
def test_its_names_are_told(name):
    data, runs = FILES[name]
    with pytest.raises(NotACheckpoint) as caught:
        recognise(MemorySource("x", data))
    assert caught.value.runs == (runs or ())
    assert "weights_only" not in caught.value.message  # no reader of such a file has it
    assert caught.value.holds_pickle is (runs is not None)
    assert all(name in caught.value.message for name in runs or ())


def test_text_that_begins_like_zlib_is_text():
    with pytest.raises(NotACheckpoint) as caught:
        recognise(MemorySource("x", b"x^2 + y^2\n"))
    assert caught.value.found == "a text file"


@pytest.mark.parametrize(("module", "data"), [("bz2", bz2.compress(PICKLE)), ("lzma", lzma.compress(PICKLE))])
def test_a_python_without_the_library_reads_nothing(monkeypatch, module, data):
    monkeypatch.setitem(sys.modules, module, None)
    assert decompressed(data, 100) == b""


def test_the_error_does_not_advise_to_unpack_it(tmp_path):
    path = tmp_path / "data.pkl.gz"
    path.write_bytes(gzip.compress(PICKLE))
    with pytest.raises(NotACheckpoint) as caught:
        ckptmove.inspect(path)
    assert "gunzip" not in caught.value.hint
