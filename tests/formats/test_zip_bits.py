"""Flipped bits in the central directory of an archive: `inspect --check` reports those that torch refuses."""

from __future__ import annotations

import io
import struct

import pytest

torch = pytest.importorskip("torch")

import ckptmove
from ckptmove.errors import CkptMoveError
from ckptmove.formats import torch_zip
from ckptmove.io import at_once

_ENTRY_BYTES = 46
#: The zip64 record, its locator and the end record.
_END_BYTES = 56 + 20 + 22
_DAMAGE = {"F801", "F802", "F803", "F805"}


def entries(data):
    """Where each entry of the directory starts, by the name of its record."""
    position = struct.unpack_from("<L", data, data.rfind(b"PK\5\6") + 16)[0]
    while data[position : position + 4] == b"PK\1\2":
        name, extra, comment = struct.unpack_from("<3H", data, position + 28)
        yield data[position + _ENTRY_BYTES : position + _ENTRY_BYTES + name].rpartition(b"/")[2], position
        position += _ENTRY_BYTES + name + extra + comment


def is_refused_by_torch(path):
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return True
    return False


def is_told(path):
    try:
        return not _DAMAGE.isdisjoint(one.code for one in ckptmove.inspect(path, check=True).findings)
    except CkptMoveError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("record", [b"data.pkl", b"byteorder", b"0", b"end records"])
def test_no_bit_that_torch_minds_passes(record, tmp_path):
    saved = io.BytesIO()
    torch.save({"w": torch.ones(4)}, saved)
    data, path = saved.getvalue(), tmp_path / "x.pt"
    places = {name: (position, _ENTRY_BYTES) for name, position in entries(data)}
    places[b"end records"] = len(data) - _END_BYTES, _END_BYTES
    (start, nbytes), minded = places[record], 0
    for bit in range(8 * nbytes):
        flipped = bytearray(data)
        flipped[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if is_refused_by_torch(path):
            minded += 1
            assert is_told(path), (bit // 8, bit % 8)
    assert minded > 100


@pytest.mark.parametrize("reads_at_once", [True, False])
def test_several_threads_find_what_one_finds(tmp_path, monkeypatch, reads_at_once):
    path = tmp_path / "many.pt"
    torch.save({str(number): torch.full((2000,), float(number)) for number in range(40)}, path)
    data = bytearray(path.read_bytes())
    for number in (3, 17, 33):
        data[data.find(struct.pack("<2f", number, number))] ^= 1
    path.write_bytes(data)
    jobs, original = [], at_once.at_once
    monkeypatch.setattr(torch_zip, "READS_AT_ONCE", reads_at_once)
    monkeypatch.setattr(at_once, "at_once", lambda *args: jobs.append(args[-1]) or original(*args))
    found = [ckptmove.inspect(path, check=True, jobs=number).findings for number in (3, 1)]
    assert jobs == [3 if reads_at_once else 1, 1]
    assert found[0] == found[1]
    assert [len(one.where) for one in found[0] if one.code == "F801"] == [3]
