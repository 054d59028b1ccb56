"""The tail that a conversion in place leaves behind a zip archive: new records, and what the archive was without them.

Never touches a byte of the archive itself: its old directory stays where it was, so that cutting off the tail brings it
back.

The tail is records, the undo record, and a directory that points to all records. No reader looks for what stands
between records and directory; torch and ``zipfile`` read the result as any archive.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive
from ckptmove.formats.zip_archive.index import read_directory
from ckptmove.formats.zip_archive.layout import Layout
from ckptmove.io.part import PartSource
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.formats.zip_archive.layout import NewRecord
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

_UNDO: Final = struct.Struct("<16s2QL")
#: With the version of the format.
_MAGIC: Final = b"ckptmove\0undo\0\0\x01"
_CRC: Final = struct.Struct("<L")
_UNDO_BYTES: Final = _UNDO.size + _CRC.size


class UndoRecord(NamedTuple):
    """What an archive was.

    Attributes:
        size: its length in bytes.
        directory_start: where its directory starts.
        directory_crc: CRC-32 from there to its end; through the CRCs in it, it stands for all records.
    """

    size: int
    directory_start: int
    directory_crc: int


def read_undo(source: ByteSource, end: int) -> UndoRecord | None:
    """The undo record that ends at an offset, as one does where a directory starts; None where there is none.

    Raises:
        SourceChanged, AccessFailed: as the source.
    """
    start = max(0, end - _UNDO_BYTES)
    raw = source.read(start, end)
    if not raw.startswith(_MAGIC) or _CRC.pack(zlib.crc32(raw[: _UNDO.size])) != raw[_UNDO.size :]:
        return None
    undo = UndoRecord(*_UNDO.unpack_from(raw)[1:])
    return undo if undo.directory_start < undo.size <= start else None


def original_directory(
    source: ByteSource, directory: ZipDirectory, undo: UndoRecord, limits: Limits
) -> ZipDirectory | None:
    """The directory that an archive had; None where it is not there any more, or is of other records.

    Args:
        source: the archive with its tail.
        directory: of both.
        undo: what the tail says of the archive.
        limits: what it may ask for.

    Raises:
        LimitExceeded, SourceChanged, AccessFailed: as they say.
    """
    try:
        found = read_directory(PartSource(source, Span(0, undo.size)), limits)
    except DamagedArchive:
        return None
    if (found.start, zlib.crc32(found.raw + found.trailer)) != (undo.directory_start, undo.directory_crc):
        return None
    if len(found.records) != len(directory.records):
        return None
    for old, new in zip(found.records, directory.records, strict=True):
        is_appended = new.header_offset >= undo.size and new.name == old.name
        if not is_appended and found.raw[old.raw_start : old.raw_end] != directory.raw[new.raw_start : new.raw_end]:
            return None
    return found


def append_records(source: ByteSource, directory: ZipDirectory, alignment: int, new: Mapping[int, NewRecord]) -> bytes:
    """The tail that gives an archive other records.

    Args:
        source: the archive, without a tail.
        directory: its own.
        alignment: of the data of its records.
        new: records by place.

    Raises:
        DamagedArchive: a header does not belong to its record.
    """
    fields = source.size, directory.start, zlib.crc32(directory.raw + directory.trailer)
    undo = _UNDO.pack(_MAGIC, *fields)
    return Layout(source, directory, alignment).append(new, undo + _CRC.pack(zlib.crc32(undo)))
