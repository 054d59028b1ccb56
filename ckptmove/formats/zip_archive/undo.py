"""The undo record of an in-place conversion: the state of a zip archive before its first one.

The record is in the tail that :mod:`ckptmove.formats.zip_archive.append` adds, right before the new central directory.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive
from ckptmove.formats.zip_archive.index import read_directory
from ckptmove.io.part import PartSource
from ckptmove.model import Span

if TYPE_CHECKING:
    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

_UNDO: Final = struct.Struct("<16s2QL")
#: Ends with the version of the format.
_MAGIC: Final = b"ckptmove\0undo\0\0\x01"
_CRC: Final = struct.Struct("<L")
_UNDO_BYTES: Final = _UNDO.size + _CRC.size


class UndoRecord(NamedTuple):
    """State of an archive before its first in-place conversion."""

    size: int  # length in bytes
    directory_start: int  # offset of its central directory
    directory_crc: int  # CRC-32 of the bytes from there to its end. The directory holds the CRCs of all records.

    def encode(self) -> bytes:
        """Return the record as bytes, with a CRC-32 at the end."""
        record = _UNDO.pack(_MAGIC, *self)
        return record + _CRC.pack(zlib.crc32(record))


def read_undo(source: ByteSource, end: int) -> UndoRecord | None:
    """The undo record that ends at an offset (the start of a directory); None if no record ends there."""
    start = max(0, end - _UNDO_BYTES)
    raw = source.read(start, end)
    if not raw.startswith(_MAGIC) or _CRC.pack(zlib.crc32(raw[: _UNDO.size])) != raw[_UNDO.size :]:
        return None
    undo = UndoRecord(*_UNDO.unpack_from(raw)[1:])
    return undo if undo.directory_start < undo.size <= start else None


def original_directory(
    source: ByteSource, directory: ZipDirectory, undo: UndoRecord, limits: Limits
) -> ZipDirectory | None:
    """The central directory before the first in-place conversion; None if it was overwritten or lists other records.

    Args:
        limits: resource limits for reading it.
    """
    try:
        found = read_directory(PartSource(source, Span(0, undo.size)), limits)
    except DamagedArchive:
        return None
    if (found.start, zlib.crc32(found.records.raw + found.trailer)) != (undo.directory_start, undo.directory_crc):
        return None
    if len(found.records) != len(directory.records):
        return None
    old, new = found.records, directory.records
    for place, offset in enumerate(new.header_offsets):
        is_appended = offset >= undo.size and new.name(place) == old.name(place)
        if not is_appended and old.entry(place) != new.entry(place):
            return None
    return found
