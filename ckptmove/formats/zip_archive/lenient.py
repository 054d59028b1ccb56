"""Find the end, the directory and the records of a zip archive as lenient readers do, in any file.

miniz and ``zipfile`` search for the end record from the end of the file, and read what it points to. A reader of
streams finds the local headers one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.formats.zip_archive.headers import LOCAL, LOCAL_BYTES, LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.index import (
    CENTRAL,
    CENTRAL_SIGNATURE,
    DEFLATED,
    END,
    END64,
    END64_SIGNATURE,
    LOCATOR,
    LOCATOR_SIGNATURE,
    U32_MAX,
    ZIP64_EXTRA,
    last_end,
)
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import ByteSource

#: Maximum length of a directory that is read.
_MOST_BYTES: Final = 1 << 26
#: Bytes at each end of a file in which a search looks; at a URL, as many as the search for the end record.
_SEARCHED: Final = 1 << 25
_SEARCHED_REMOTELY: Final = 1 << 16


class ZipEnd(NamedTuple):
    """The end of an archive, whose directory has at least one entry."""

    at: int  # offset of the end record
    start: int  # offset of the directory
    shift: int  # bytes of the file before the archive, by which its offsets are too small


class FoundRecord(NamedTuple):
    """A record of a zip archive."""

    name: str  # its name in its local header
    span: Span  # its bytes as stored, up to the end of the file if their number is unknown
    is_deflated: bool  # whether a reader could inflate them
    #: whether it was found by its local header, in the bytes of another record: an archive in the archive.
    is_inside: bool


def searched_bytes(source: ByteSource) -> int:
    """Number of bytes at each end of a file in which a search looks."""
    return min(source.size, _SEARCHED_REMOTELY if source.is_remote else _SEARCHED)


def find_end(source: ByteSource) -> ZipEnd | None:
    """Find the end of the archive at the end of a file; None if no reader would find one."""
    at, tail = last_end(source)
    if not tail:
        return None
    *_, nbytes, start, _ = END.unpack_from(tail)
    ends = [(nbytes, start, at), *_wide_ends(source, at)]
    for shifted in (False, True):
        for length, offset, stop in ends:
            begin = stop - length if shifted else offset
            if begin >= 0 and _at(source, begin, len(CENTRAL_SIGNATURE)) == CENTRAL_SIGNATURE:
                return ZipEnd(at, begin, begin - offset)
    return None


def find_records(source: ByteSource, end: ZipEnd | None) -> Iterator[FoundRecord]:
    """The records in the directory, then those that only have a local header, near both ends of the file."""
    listed = dict(_listed(source, end)) if end is not None else {}
    spans: list[Span] = []
    for offset, entry in listed.items():
        record = _record(source, offset, entry)
        if record is not None:
            spans += [record.span] if record.span.end < source.size else []
            yield record
    spans.sort()
    place = covered = 0
    for offset in local_headers(source):
        record = _record(source, offset, None) if offset not in listed else None
        if record is None:
            continue
        while place < len(spans) and spans[place].start <= offset:
            covered = max(covered, spans[place].end)
            place += 1
        yield record._replace(is_inside=offset < covered)
        if record.span.end < source.size:
            covered = max(covered, record.span.end)


def local_headers(source: ByteSource) -> Iterator[int]:
    """Offsets of what begins like a local header, near both ends of a file."""
    nbytes = searched_bytes(source)
    for first, last in ((0, nbytes), (max(nbytes, source.size - nbytes), source.size)):
        data = source.read(first, last) if first < last else b""
        at = data.find(LOCAL_SIGNATURE)
        while at >= 0:
            yield first + at
            at = data.find(LOCAL_SIGNATURE, at + 1)


def _record(source: ByteSource, offset: int, listed: tuple[int, int] | None) -> FoundRecord | None:
    """The record at a local header, with method and length of the directory; None if no header stands there."""
    head = _at(source, offset, LOCAL_BYTES)
    if not head.startswith(LOCAL_SIGNATURE):
        return None
    _, _, _, method, _, _, _, stored, _, name_bytes, extra_bytes = LOCAL.unpack(head)
    begin = offset + LOCAL_BYTES
    start = begin + name_bytes + extra_bytes
    if start > source.size:
        return None
    name = source.read(begin, begin + name_bytes).decode("utf-8", "backslashreplace")
    # torch reads what the directory says; a reader of streams, what the local header says, where 0 is unknown.
    listed_method, nbytes = listed or (method, stored)
    end = start + nbytes if 0 < nbytes <= source.size - start else source.size
    return FoundRecord(name, Span(start, end), DEFLATED in {method, listed_method}, is_inside=False)


def _listed(source: ByteSource, end: ZipEnd) -> Iterator[tuple[int, tuple[int, int]]]:
    """Offset, method and stored length of each entry of a directory, up to the first that is not one."""
    raw = source.read(end.start, max(end.start, min(end.at, end.start + _MOST_BYTES)))
    position = 0
    while raw.startswith(CENTRAL_SIGNATURE, position) and position + CENTRAL.size <= len(raw):
        _, _, method, _, stored, nbytes, name_n, extra_n, comment_n, _, _, offset = CENTRAL.unpack_from(raw, position)
        begin = position + CENTRAL.size + name_n
        position = begin + extra_n + comment_n
        wide = _wide(raw[begin : begin + extra_n], [nbytes, stored, offset])
        yield wide[2] + end.shift, (method, wide[1])


def _wide_ends(source: ByteSource, at: int) -> Iterator[tuple[int, int, int]]:
    """Length and offset of the directory in zip64 records, and the offset of the record."""
    locator = _at(source, at - LOCATOR.size, LOCATOR.size)
    if locator.startswith(LOCATOR_SIGNATURE):
        for stop in (LOCATOR.unpack(locator)[2], at - LOCATOR.size - END64.size):
            record = _at(source, stop, END64.size)
            if record.startswith(END64_SIGNATURE):
                *_, nbytes, start = END64.unpack(record)
                yield nbytes, start, stop


def _wide(extra: bytes, narrow: list[int]) -> list[int]:
    """The fields of an entry, with those that are full from its zip64 extra field."""
    while len(extra) >= 4:  # tag and length
        tag, length = int.from_bytes(extra[:2], "little"), int.from_bytes(extra[2:4], "little")
        if tag == ZIP64_EXTRA:
            body = extra[4 : 4 + length]
            for index, value in enumerate(narrow):
                if value == U32_MAX:
                    narrow[index], body = int.from_bytes(body[:8], "little"), body[8:]
            break
        extra = extra[4 + length :]
    return narrow


def _at(source: ByteSource, start: int, nbytes: int) -> bytes:
    """Bytes at an offset; empty if some of them are outside of the file."""
    return source.read(start, start + nbytes) if 0 <= start <= source.size - nbytes else b""
