"""New zip archives: equal to those of torch's own writer, byte for byte, and read by zipfile."""

from __future__ import annotations

import io
import zipfile
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.formats.zip_archive.create import Record, new_archive
from ckptmove.io.contracts import BytesSegment, StreamSegment
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of, length

pytestmark = pytest.mark.unmeasured

GIB = 1 << 30
NAMES = st.text(st.characters(codec="utf-8", categories=("Ll", "Nd")), min_size=1, max_size=40)


def data_of(segments):
    return b"".join(blocks_of(MemorySource("none", b""), segments))


def torch_archive(contents):
    """An archive of torch's writer, and all records in it: torch adds three."""
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for name, data in contents.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    with zipfile.ZipFile(stream) as archive:
        return stream.getvalue(), [(name.removeprefix("archive/"), archive.read(name)) for name in archive.namelist()]


def record(name, data, *, is_known=True):
    segments = (BytesSegment(data[:3]), StreamSegment(len(data[3:]), lambda: iter((data[3:],))))
    return Record(name, segments, zlib.crc32(data) if is_known else None)


@given(
    contents=st.dictionaries(
        NAMES.filter(lambda name: name not in {"version", "byteorder"}), st.binary(max_size=200), max_size=6
    ),
    known=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_random_records_as_torch_writes_them(contents, known):
    theirs, records = torch_archive(contents)
    pairs = zip(records, known, strict=False)
    segments = new_archive("archive", [record(*one, is_known=is_known) for one, is_known in pairs])
    assert data_of(segments) == theirs
    assert sum(map(length, segments)) == len(theirs)


@pytest.mark.slow
def test_more_records_than_16_bits_count():
    theirs, records = torch_archive({f"data/{key}": b"x" for key in range(66_000)})
    assert data_of(new_archive("archive", [record(*one) for one in records])) == theirs
    assert len(zipfile.ZipFile(io.BytesIO(theirs)).namelist()) == len(records) > 0xFFFF


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_data_starts_at_the_alignment(alignment):
    contents = {f"{n}" * n: bytes([n]) * (10 * n) for n in range(1, 9)}
    data = data_of(new_archive("a", [record(*one) for one in contents.items()], alignment))
    for value in contents.values():
        assert data.index(value) % alignment == 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(f"a/{name}") for name in contents} == contents


def sparse(path, huge):
    """A checkpoint with huge storages of zeros; torch writes it without CRCs, and the disk has no room for it."""
    with torch.serialization.skip_data():
        torch.save(
            {"a": torch.ones(3), "z": torch.empty(huge, dtype=torch.uint8), "e": torch.ones(0), "d": torch.ones(5)},
            path,
        )
    with zipfile.ZipFile(path) as archive:
        return [(info.filename, info.file_size, info.CRC) for info in archive.infolist()]


@pytest.mark.parametrize("huge", [5 * GIB, 4 * GIB - 1, 4 * GIB - 2000])
def test_lengths_and_offsets_of_64_bits_as_torch_writes_them(tmp_path, huge):
    records = [
        Record(name.partition("/")[2], (StreamSegment(nbytes, lambda: iter(())),), crc)
        for name, nbytes, crc in sparse(tmp_path / "a.pt", huge)
    ]
    place = 0
    with (tmp_path / "a.pt").open("rb") as theirs:
        for segment in new_archive("a", records):
            if not isinstance(segment, StreamSegment):
                theirs.seek(place)
                assert theirs.read(length(segment)) == data_of([segment])
            place += length(segment)
    assert place == (tmp_path / "a.pt").stat().st_size > 4 * GIB - 2000
