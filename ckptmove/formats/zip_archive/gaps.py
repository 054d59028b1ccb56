"""What a zip archive holds outside of its records: bytes that one reader passes over and another one may take up.

Never reads what lies there, and never a header where there is no room for more than padding.
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

#: What a data descriptor takes, at most.
_DESCRIPTOR_BYTES: Final = 24
#: What stands between two records of torch's besides the padding: tags of extra fields, zip64's, a descriptor.
_BETWEEN: Final = 128


def hidden_bytes(directory: ZipDirectory, headers: LocalHeaders, alignment: int, path: str) -> Iterator[ArchiveFact]:
    """One fact for each run of bytes that belongs to no record.

    Args:
        directory: of the archive.
        headers: reads the local headers of its records.
        alignment: of its records' data.
        path: for errors.

    Raises:
        DamagedArchive: two records share bytes, or the header before such a run is none.
    """
    room = alignment + _BETWEEN
    claimed, before = 0, None
    for record in sorted(directory.records, key=lambda one: one.header_offset):
        start = record.header_offset
        if start < claimed:
            raise DamagedArchive(path, f"record '{record.name}' lies inside of another one")
        if start > claimed + room or before is None:
            yield from _gap(before, headers, min(start, directory.start))
        claimed, before = start + LOCAL_BYTES + len(record.name) + record.stored_bytes, record
    if claimed + room < directory.start:
        yield from _gap(before, headers, directory.start)
    if directory.behind:
        yield ArchiveFact("stray-bytes", "what follows the directory", directory.behind)


def _gap(before: ZipRecord | None, headers: LocalHeaders, start: int) -> Iterator[ArchiveFact]:
    """What lies between the end of a record, or the start of the file, and what begins at an offset."""
    end = headers.read(before).data_start + before.stored_bytes if before is not None else 0
    nbytes = start - end
    if before is not None and nbytes <= _DESCRIPTOR_BYTES:
        return
    if nbytes:
        what = f"what follows {before.name}" if before is not None else "what stands before the records"
        yield ArchiveFact("stray-bytes", what, nbytes)
