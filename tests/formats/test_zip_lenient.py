"""The end, the directory and the records of a zip archive that only a lenient reader would find."""

from __future__ import annotations

import struct

import pytest

from ckptmove.formats.zip_archive.headers import LOCAL, LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.index import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    END,
    END64,
    END64_SIGNATURE,
    END_SIGNATURE,
    LOCATOR,
    LOCATOR_SIGNATURE,
    U16_MAX,
    U32_MAX,
)
from ckptmove.formats.zip_archive.lenient import find_end, find_records
from ckptmove.io.part import MemorySource

OTHER = struct.pack("<HHH", 0x7875, 2, 0)
FULL = U32_MAX


def local(name=b"a", data=b"data", *, stored=None, name_bytes=None):
    lengths = len(data) if stored is None else stored, len(data), len(name) if name_bytes is None else name_bytes
    return LOCAL.pack(LOCAL_SIGNATURE, 0, 0, 0, 0, 0, 0, *lengths, 0) + name + data


A = local()


def wide(*numbers):
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def central(stored, nbytes, offset, extra=b""):
    sizes = stored, nbytes, 1, len(extra), 0
    head = CENTRAL.pack(CENTRAL_SIGNATURE, 0, 0, 0, *sizes, 0, 0, offset)
    return head + b"a" + extra


def archive(directory, *, begin=A, end64=True, locator=None):
    stop = len(begin) + len(directory)
    tail = b""
    if end64:
        head = END64.pack(END64_SIGNATURE, 44, 0, 0, 0, 0, 1, 1, len(directory), len(begin))
        tail = head + LOCATOR.pack(LOCATOR_SIGNATURE, 0, stop if locator is None else locator, 1)
        numbers = U16_MAX, U16_MAX, FULL, FULL
    else:
        numbers = 1, 1, len(directory), len(begin)
    return begin + directory + tail + END.pack(END_SIGNATURE, 0, 0, *numbers, 0)


def found(data):
    source = MemorySource("x", data)
    return [(one.name, source.read(*one.span)) for one in find_records(source, find_end(source))]


ENTRIES = {
    "narrow": central(4, 4, 0),
    "all numbers wide": central(FULL, FULL, FULL, OTHER + wide(4, 4, 0)),
    "its place wide": central(4, 4, FULL, wide(0)),
    "another field alone": central(4, 4, 0, OTHER),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("options", [{}, {"locator": 1}, {"end64": False}], ids=["zip64", "moved", "plain"])
def test_its_record_is_found(entry, options) -> None:
    assert found(archive(ENTRIES[entry], **options)) == [("a", b"data")]


def test_an_archive_after_other_bytes_has_an_end() -> None:
    source = MemorySource("x", b"junk" + archive(ENTRIES["narrow"], end64=False))
    end = find_end(source)
    assert end is not None
    assert end.shift == 4


def test_an_end_without_a_directory_is_none() -> None:
    assert find_end(MemorySource("x", archive(b"", end64=False))) is None
    assert find_end(MemorySource("x", b"nothing")) is None


def test_headers_outside_of_the_file_are_no_records() -> None:
    assert found(archive(central(4, 4, 10**6), end64=False)) == [("a", b"data")]  # it is still found by its header
    assert found(local() + LOCAL_SIGNATURE) == [("a", b"data")]
    assert found(local() + local(name_bytes=999)) == [("a", b"data")]


def test_what_is_inside_of_a_record() -> None:
    inner = local(b"inner")
    data = local(b"outer", inner) + local(b"next") + local(b"last", stored=0)
    source = MemorySource("x", data + bytes(9))
    inside = {one.name: one.is_inside for one in find_records(source, None)}
    assert inside == {"outer": False, "inner": True, "next": False, "last": False}


def test_what_is_inside_of_a_record_of_the_directory() -> None:
    inner = local(b"inner")
    directory = central(len(inner), len(inner), 0)
    source = MemorySource("x", archive(directory, begin=local(b"a", inner) + local(b"free"), end64=False))
    inside = {one.name: one.is_inside for one in find_records(source, find_end(source))}
    assert inside == {"a": False, "inner": True, "free": False}


def test_both_ends_of_a_large_file_are_searched(monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.formats.zip_archive.lenient._SEARCHED", 50)
    assert [name for name, _ in found(local(b"a") + bytes(99) + local(b"b") + bytes(99) + local(b"c"))] == ["a", "c"]
