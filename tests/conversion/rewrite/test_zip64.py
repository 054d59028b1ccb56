"""Offsets and sizes that need 64 bits, on sparse files that torch itself laid out."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from ckptmove.formats.zip_archive.headers import LocalHeaders
from ckptmove.formats.zip_archive.index import read_directory
from ckptmove.formats.zip_archive.layout import Layout, NewRecord
from ckptmove.io.contracts import BytesSegment, CastSegment
from ckptmove.limits import Limits


def pad(length):
    return lambda pickle: pickle[:-1] + b"q\xff" * (length // 2) + b"."


def sparse(path, nbytes, dtype=torch.float64):
    """A checkpoint with a huge storage, as a sparse file that torch writes."""
    with torch.serialization.skip_data():
        state = {
            "a": torch.ones(3),
            "huge": torch.empty(nbytes, dtype=torch.uint8),
            "y": torch.ones(5),
            "d": torch.ones(4, dtype=dtype),
        }
        torch.save(state, path)


def sparse_copy(container, segments, output):
    """Apply segments without the holes of the source; a cast is left a hole."""
    place = 0
    with Path(container.source.path).open("rb") as source, output.open("wb") as target:
        for segment in segments:
            if isinstance(segment, BytesSegment):
                os.pwrite(target.fileno(), segment.data, place)
                place += len(segment.data)
                continue
            if isinstance(segment, CastSegment):
                place += segment.segment.span.nbytes // 2
                continue
            start, end = segment.span.start, segment.span.end
            at = start
            while at < end:
                try:
                    at = os.lseek(source.fileno(), at, os.SEEK_DATA)
                except OSError:
                    break
                hole = min(os.lseek(source.fileno(), at, os.SEEK_HOLE), end)
                if at < end:
                    os.pwrite(target.fileno(), os.pread(source.fileno(), hole - at, at), place + at - start)
                at = hole
            place += end - start
        target.truncate(place)


def sparse_rewrite(opened, path, output, change):
    with opened(path) as container:
        segments = container.lay_out(change(container.object_pickle()), {})
        sparse_copy(container, segments, output)
        assert all(len(segment.data) < 10_000 for segment in segments if isinstance(segment, BytesSegment))


def records(path):
    with zipfile.ZipFile(path) as archive:
        return {info.filename: (info.file_size, info.header_offset, info.CRC) for info in archive.infolist()}


@pytest.mark.parametrize("place", ["far-beyond", "crossing"])
def test_offsets_beyond_4_gib(tmp_path, place, opened):
    source = tmp_path / "a.pt"
    nbytes = (1 << 32) + 1000
    if place == "crossing":
        sparse(source, nbytes := (1 << 32) - 2000)
        nbytes += (1 << 32) - 40 - records(source)["a/data/2"][1]
    sparse(source, nbytes)
    before = records(source)
    sparse_rewrite(opened, source, tmp_path / "b.pt", pad(200))
    after = records(tmp_path / "b.pt")
    assert list(after) == list(before)
    for name in before:
        if "data.pkl" not in name:
            assert (after[name][0], after[name][2]) == (before[name][0], before[name][2])
    moved = after["a/data/2"][1] - before["a/data/2"][1]
    assert moved > 0
    assert moved % 64 == 0
    if place == "crossing":
        assert before["a/data/2"][1] < 1 << 32 <= after["a/data/2"][1]
    loaded = torch.load(tmp_path / "b.pt", mmap=True, weights_only=True)
    assert loaded["huge"].shape == (nbytes,)
    assert (tmp_path / "b.pt").stat().st_size > 1 << 32
    with opened(source) as container:
        original = container.object_pickle()
    sparse_rewrite(opened, tmp_path / "b.pt", tmp_path / "c.pt", lambda _: original)
    assert (tmp_path / "c.pt").stat().st_size == source.stat().st_size
    assert records(tmp_path / "c.pt") == before


def header(path, record):
    """Local header, name and extra fields of a record, and its data descriptor in zip64."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(record)
    with path.open("rb") as file:
        file.seek(info.header_offset)
        fixed = file.read(30)
        rest = file.read(sum(struct.unpack_from("<2H", fixed, 26)))
        file.seek(info.file_size, os.SEEK_CUR)
        signature, _, *sizes = struct.unpack("<4sL2Q", file.read(24))
    return fixed + rest, signature, sizes


def test_a_cast_beyond_4_gib_is_written_as_torch_would(tmp_path, opened):
    sparse(tmp_path / "a.pt", (1 << 32) + 1000)
    (tmp_path / "float32").mkdir()
    theirs = tmp_path / "float32" / "a.pt"
    sparse(theirs, (1 << 32) + 1000, dtype=torch.float32)
    with opened(theirs) as container:
        pickle = container.object_pickle()
    with opened(tmp_path / "a.pt") as container:
        segments = container.lay_out(pickle, {"3": ("float64", "float32")})
        sparse_copy(container, segments, tmp_path / "b.pt")
    assert {name: place[:2] for name, place in records(tmp_path / "b.pt").items()} == {
        name: place[:2] for name, place in records(theirs).items()
    }
    assert header(tmp_path / "b.pt", "a/data/3") == header(theirs, "a/data/3")
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.read("a/data/3") == bytes(16)


def test_a_record_of_more_than_4_gib_is_written_as_torch_would(tmp_path, opened):
    nbytes = (1 << 32) + 5000
    sparse(tmp_path / "a.pt", (1 << 32) + 1000)
    (tmp_path / "more").mkdir()
    theirs = tmp_path / "more" / "a.pt"
    sparse(theirs, nbytes)
    with opened(tmp_path / "a.pt") as container, opened(theirs) as wanted:
        directory = read_directory(container.source, Limits())
        (place,) = [record.place for record in directory.records if record.name == "a/data/1"]
        replaced = NewRecord((BytesSegment(b""),), nbytes, 0)
        segments = Layout(LocalHeaders(container.source, directory), 64).build({place: replaced})
        begin = wanted.storage_span("1").start
        descriptor = wanted.source.read(begin + nbytes, begin + nbytes + 24)
    at = segments.index(*replaced.segments)
    assert segments[at - 1].data == header(theirs, "a/data/1")[0]
    assert segments[at + 1].data == descriptor
