"""Find the end and the directory of a zip archive as lenient readers do, in any file.

miniz and ``zipfile`` search for the end record from the end of the file, and read what it points to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

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
    ZIP64_EXTRA,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import ByteSource

#: Maximum length of a directory that is read.
_MOST_BYTES: Final = 1 << 26


class ZipEnd(NamedTuple):
    """The end of an archive, whose directory has at least one entry.

    Attributes:
        at: offset of the end record.
        start: offset of the directory.
        shift: bytes of the file before the archive, by which its offsets are too small.
    """

    at: int
    start: int
    shift: int


class ListedHeader(NamedTuple):
    """What a directory says about a record.

    Attributes:
        offset: of its local header in the file.
        method: compression method.
        stored_bytes: length in the archive.
    """

    offset: int
    method: int
    stored_bytes: int


def find_end(source: ByteSource) -> ZipEnd | None:
    """Find the end of the archive at the end of a file; None if no reader would find one.

    Raises:
        SourceChanged, AccessFailed: as the source.
    """
    first = max(0, source.size - END.size - U16_MAX)
    tail = source.read(first, source.size)
    found = tail.rfind(END_SIGNATURE, 0, max(0, len(tail) - END.size + len(END_SIGNATURE)))
    if found < 0:
        return None
    at = first + found
    *_, nbytes, start, _ = END.unpack_from(tail, found)
    ends = [(nbytes, start, at), *_wide_ends(source, at)]
    for shifted in (False, True):
        for length, offset, stop in ends:
            begin = stop - length if shifted else offset
            if begin >= 0 and _at(source, begin, len(CENTRAL_SIGNATURE)) == CENTRAL_SIGNATURE:
                return ZipEnd(at, begin, begin - offset)
    return None


def listed_headers(source: ByteSource, end: ZipEnd) -> Iterator[ListedHeader]:
    """The entries of a directory, up to the first that is not one.

    Raises:
        SourceChanged, AccessFailed: as the source.
    """
    raw = source.read(end.start, max(end.start, min(end.at, end.start + _MOST_BYTES)))
    position = 0
    while raw.startswith(CENTRAL_SIGNATURE, position) and position + CENTRAL.size <= len(raw):
        _, _, method, _, stored, nbytes, name_n, extra_n, comment_n, _, _, offset = CENTRAL.unpack_from(raw, position)
        begin = position + CENTRAL.size + name_n
        position = begin + extra_n + comment_n
        wide = _wide(raw[begin : begin + extra_n], [nbytes, stored, offset])
        yield ListedHeader(wide[2] + end.shift, method, wide[1])


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
