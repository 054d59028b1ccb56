"""Find bytes of a zip archive that belong to no record: one reader skips them, another may read them.

The bytes are not read, and a header is read only if the gap after its record is larger than padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive
from ckptmove.formats.zip_archive.headers import LOCAL_BYTES
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.formats.zip_archive.headers import LocalHeaders
    from ckptmove.formats.zip_archive.index import ZipDirectory, ZipRecords

#: Maximum length of a data descriptor.
_DESCRIPTOR_BYTES: Final = 24
#: Maximum length between two records of torch without the padding: tags of extra fields, zip64 sizes, a descriptor.
_BETWEEN: Final = 128


def hidden_bytes(
    directory: ZipDirectory, headers: LocalHeaders, alignment: int, size: int
) -> Iterator[tuple[str, Span]]:
    """Name and span of each run of bytes that belongs to no record of an archive of this size."""
    room, records = alignment + _BETWEEN, directory.records
    names, offsets, sizes = records.name_bytes, records.header_offsets, records.stored_bytes
    claimed, before = 0, None
    for place in records.in_file_order():
        start = offsets[place]
        if start < claimed:
            raise DamagedArchive(headers.source.path, f"record '{records.name(place)}' overlaps another record")
        if start > claimed + room or before is None:
            yield from _gap(records, before, headers, min(start, directory.start))
        claimed, before = start + LOCAL_BYTES + names[place] + sizes[place], place
    if claimed + room < directory.start:
        yield from _gap(records, before, headers, directory.start)
    if directory.bytes_after_end:
        yield "bytes after the directory", Span(size - directory.bytes_after_end, size)


def _gap(records: ZipRecords, before: int | None, headers: LocalHeaders, start: int) -> Iterator[tuple[str, Span]]:
    """The gap between the end of a record, or the start of the file, and an offset."""
    end = headers.data_start(before) + records.stored_bytes[before] if before is not None else 0
    nbytes = start - end
    if before is not None and nbytes <= _DESCRIPTOR_BYTES:
        return
    if nbytes:
        what = f"bytes after {records.name(before)}" if before is not None else "bytes before the records"
        yield what, Span(end, start)
