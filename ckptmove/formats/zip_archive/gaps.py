"""Find bytes of a zip archive that belong to no record: one reader skips them, another may read them.

The bytes are not read, and a header is read only if the gap after its record is larger than padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive
from ckptmove.formats.zip_archive.layout import LOCAL_BYTES
from ckptmove.model import ArchiveFact

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.formats.zip_archive.index import ZipDirectory, ZipRecord
    from ckptmove.formats.zip_archive.layout import LocalHeaders

#: Maximum length of a data descriptor.
_DESCRIPTOR_BYTES: Final = 24
#: Maximum length between two records of torch without the padding: tags of extra fields, zip64 sizes, a descriptor.
_BETWEEN: Final = 128


def hidden_bytes(directory: ZipDirectory, headers: LocalHeaders, alignment: int, path: str) -> Iterator[ArchiveFact]:
    """One fact for each run of bytes that belongs to no record.

    Raises:
        DamagedArchive: if two records share bytes, or the header before a gap is invalid.
    """
    room = alignment + _BETWEEN
    claimed, before = 0, None
    for record in sorted(directory.records, key=lambda one: one.header_offset):
        start = record.header_offset
        if start < claimed:
            raise DamagedArchive(path, f"record '{record.name}' overlaps another record")
        if start > claimed + room or before is None:
            yield from _gap(before, headers, min(start, directory.start))
        claimed, before = start + LOCAL_BYTES + len(record.name) + record.stored_bytes, record
    if claimed + room < directory.start:
        yield from _gap(before, headers, directory.start)
    if directory.bytes_after_end:
        yield ArchiveFact("stray-bytes", "bytes after the directory", directory.bytes_after_end)


def _gap(before: ZipRecord | None, headers: LocalHeaders, start: int) -> Iterator[ArchiveFact]:
    """The gap between the end of a record, or the start of the file, and an offset."""
    end = headers.data_start(before) + before.stored_bytes if before is not None else 0
    nbytes = start - end
    if before is not None and nbytes <= _DESCRIPTOR_BYTES:
        return
    if nbytes:
        what = f"bytes after {before.name}" if before is not None else "bytes before the records"
        yield ArchiveFact("stray-bytes", what, nbytes)
