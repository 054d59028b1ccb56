"""The central directory of a zip archive: parsed like ``zipfile``, refused if it is wrong, written byte for byte."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest

from ckptmove.errors import CkptMoveError, DamagedArchive, LimitExceeded
from ckptmove.formats.zip_archive.index import Replacement, emit_directory, join_extra, read_directory, split_extra
from ckptmove.limits import Limits

BIG = 0xFFFFFFFF


class Memory:
    """A source in memory."""

    def __init__(self, data):
        self.path, self.size, self._data = "m.pt", len(data), data

    def read(self, start, end):
        if not 0 <= start <= end <= self.size:
            raise DamagedArchive(self.path, "outside")
        return self._data[start:end]


class Far(Memory):
    """A source that has nothing but zeros before an offset."""

    def __init__(self, start, data):
        super().__init__(data)
        self.size, self._start = start + len(data), start

    def read(self, start, end):
        return (
            bytes(min(max(self._start - start, 0), end - start))
            + self._data[max(start - self._start, 0) : max(end - self._start, 0)]
        )


def archive(*, comment=b"", names=("a/data.pkl", "a/data/0", "a/vérsion"), **kinds):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **kinds) as writer:
        for name in names:
            writer.writestr(name, name.encode() * 9)
        writer.comment = comment
    return stream.getvalue()


def parse(data, limits=None):
    return read_directory(Memory(data), limits or Limits())


def field(data, at, layout, value):
    """The data with one field of its last end record (or ``at`` bytes from it) overwritten."""
    start = data.rfind(b"PK\x05\x06") + at
    return data[:start] + struct.pack(layout, value) + data[start + struct.calcsize(layout) :]


def entry_field(data, at, layout, value):
    start = data.find(b"PK\x01\x02") + at
    return data[:start] + struct.pack(layout, value) + data[start + struct.calcsize(layout) :]


def with_zip64(data):
    """The archive with zip64 end records, as torch always writes them."""
    end = data.rfind(b"PK\x05\x06")
    count, nbytes, start = struct.unpack_from("<H2L", data, end + 10)
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0x31E, 45, 0, 0, count, count, nbytes, start)
    return data[:end] + record + struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1) + data[end:]


@pytest.mark.parametrize("comment", [b"", b"said by hand", b"x" * 65535])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_it_agrees_with_zipfile(comment, compression):
    data = archive(comment=comment, compression=compression)
    directory = parse(data)
    infos = zipfile.ZipFile(io.BytesIO(data)).infolist()
    assert [
        (r.name, r.flags, r.method, r.crc, r.stored_bytes, r.nbytes, r.header_offset) for r in directory.records
    ] == [
        (i.filename, i.flag_bits, i.compress_type, i.CRC, i.compress_size, i.file_size, i.header_offset) for i in infos
    ]
    assert directory.shift == 0
    records = directory.records
    assert [*records.names()] == [records.name(place) for place in range(len(infos))] == [i.filename for i in infos]
    assert [*map(records.__getitem__, range(len(infos)))] == [*records]


@pytest.mark.parametrize(
    "data", [archive(), archive(comment=b"c"), with_zip64(archive()), with_zip64(archive()) + b"j"]
)
def test_unmoved_it_is_emitted_as_it_was(data):
    directory = parse(data)
    offsets = [record.header_offset for record in directory.records]
    assert emit_directory(directory, directory.start, offsets, {}, "m.pt") == data[directory.start :]


@pytest.mark.parametrize("make", [archive, lambda: with_zip64(archive()), lambda: archive(comment=b"c")])
@pytest.mark.parametrize("shift", [64, 1 << 33])
def test_moved_beyond_4_gib_and_back(make, shift):
    data = make()
    directory = parse(data)
    offsets = [record.header_offset + shift for record in directory.records]
    emitted = emit_directory(directory, directory.start + shift, offsets, {}, "m.pt")
    # Bytes before the central directory are not read, so the source need not contain them.
    far_directory = read_directory(Far(directory.start + shift, emitted), Limits())
    assert [record.header_offset for record in far_directory.records] == offsets
    assert [record.nbytes for record in far_directory.records] == [record.nbytes for record in directory.records]
    back = [record.header_offset for record in directory.records]
    again = emit_directory(far_directory, directory.start, back, {}, "m.pt")
    assert [*parse(data[: directory.start] + again).records] == [*directory.records]


def test_a_replaced_record_is_stored_and_may_be_huge():
    data = archive(compression=zipfile.ZIP_DEFLATED)
    directory = parse(data)
    offsets = [record.header_offset for record in directory.records]
    small = emit_directory(directory, directory.start, offsets, {1: Replacement(0, 7, 30)}, "m.pt")
    record = parse(data[: directory.start] + small).records[1]
    assert (record.method, record.crc, record.stored_bytes, record.nbytes) == (0, 7, 30, 30)
    huge = emit_directory(directory, directory.start, offsets, {1: Replacement(0, 7, 1 << 34)}, "m.pt")
    record = parse(data[: directory.start] + huge).records[1]
    assert (record.stored_bytes, record.nbytes, record.header_offset) == (1 << 34, 1 << 34, offsets[1])
    assert parse(data[: directory.start] + huge).records[2].name == "a/vérsion"


def test_fields_that_were_full_without_need_stay_full():
    data = field(field(with_zip64(archive()), 12, "<L", BIG), 16, "<L", BIG)
    directory = parse(data)
    offsets = [record.header_offset for record in directory.records]
    assert emit_directory(directory, directory.start, offsets, {}, "m.pt") == data[directory.start :]


@pytest.mark.unmeasured
def test_more_entries_than_16_bits_can_count():
    data = archive(names=[f"a/data/{number}" for number in range(65_600)])
    assert len(parse(data).records) == 65_600
    assert zipfile.ZipFile(io.BytesIO(data)).infolist()[-1].filename == "a/data/65599"


def test_more_entries_than_the_limit():
    with pytest.raises(LimitExceeded) as caught:
        parse(archive(), Limits(records=2))
    assert (caught.value.limit, caught.value.actual) == (2, 3)


def test_an_empty_directory():
    data = archive(names=())
    assert len(parse(data).records) == 0


def test_bytes_before_the_archive_are_counted():
    assert parse(b"x" * 100 + archive()).shift == 100


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda data: data[:-30], "truncated"),
        (lambda data: field(data, 4, "<H", 1), "several files"),
        (lambda data: field(data, 6, "<H", 1), "several files"),
        (lambda data: field(data, 8, "<H", 2), "several files"),
        (lambda data: field(field(data, 8, "<H", 4), 10, "<H", 4), "but 3"),
        (lambda data: field(field(data, 8, "<H", 2), 10, "<H", 2), "but 3"),
        (lambda data: field(data, 12, "<L", 10_000), "past its end"),
        (lambda data: field(data, 16, "<L", 10_000), "past its end"),
        (lambda data: entry_field(data, 0, "<4s", b"PK\x09\x09"), "but 0"),
        (lambda data: entry_field(data, 28, "<H", 60_000), "but 0"),
        (lambda data: entry_field(data, 20, "<L", 1), "different lengths"),
        (lambda data: entry_field(data, 42, "<L", BIG), "zip64 lengths"),
        (lambda data: field(with_zip64(data), -20, "<4s", b"PK\x06\x07")[:-1] + b"", "truncated"),
        (lambda data: field(with_zip64(data), -76, "<4s", b"PKxx"), "zip64 record is not where"),
        (lambda data: field(with_zip64(data), -76 + 4, "<Q", 43), "zip64 record is not where"),
        (lambda data: field(with_zip64(data), -76 + 16, "<L", 1), "several files"),
        (lambda data: field(with_zip64(data), -76 + 20, "<L", 2), "several files"),
        (lambda data: field(with_zip64(data), -76 + 24, "<Q", 2), "several files"),
        (lambda data: field(with_zip64(data), -4, "<L", 2), "several files"),
        (lambda data: field(field(with_zip64(data), -76 + 24, "<Q", 2), -76 + 32, "<Q", 2), "end record has 3"),
        (lambda data: field(with_zip64(data), -12, "<Q", 5), "zip64 locator"),
    ],
)
def test_lies_are_refused(change, detail):
    with pytest.raises(DamagedArchive, match=detail):
        parse(change(archive()))


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        (lambda data: data, ""),
        (lambda data: entry_field(data, 8, "<H", 1), "encrypted"),
        (lambda data: entry_field(data, 8, "<H", 0x40), "encrypted"),
        (lambda data: entry_field(data, 8, "<H", 0x2000), "encrypted"),
        (lambda data: entry_field(data, 8, "<H", 0x20), "a patch of something else"),
        (lambda data: entry_field(entry_field(data, 8, "<H", 1), 20, "<L", 1), "encrypted"),
        (lambda data: entry_field(data, 10, "<H", 8), ""),
        (lambda data: entry_field(data, 10, "<H", 12), "compressed with bzip2"),
        (lambda data: entry_field(data, 10, "<H", 9), "compressed with method 9"),
    ],
)
def test_what_was_done_to_a_record_that_is_not_read(change, obstacle):
    assert parse(change(archive())).records[0].obstacle == obstacle


def test_truncated_anywhere_only_our_errors_escape():
    data = with_zip64(archive())
    for length in range(len(data)):
        with pytest.raises(CkptMoveError):
            parse(data[:length])


def test_extras_come_apart_and_together():
    extra = struct.pack("<HH2sHH", 0x4246, 2, b"ZZ", 7, 0)
    fields = split_extra(extra, "m.pt", "r")
    assert fields == ((0x4246, b"ZZ"), (7, b""))
    assert join_extra(fields) == extra


@pytest.mark.parametrize("extra", [b"F", b"FB\x01", b"FB\x05\x00ZZ"])
def test_an_extra_that_reaches_too_far(extra):
    with pytest.raises(DamagedArchive, match="'r'"):
        split_extra(extra, "m.pt", "r")
