"""Append the tail of an in-place conversion to a zip archive.

The tail holds new records, the undo record, and a central directory that points to all records. The archive itself
stays unchanged, with its old directory: cutting off the tail restores it. torch and ``zipfile`` skip the bytes between
the records and the new directory.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from ckptmove.formats.zip_archive.headers import LocalHeaders
from ckptmove.formats.zip_archive.layout import Layout
from ckptmove.formats.zip_archive.undo import UndoRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.formats.zip_archive.layout import NewRecord
    from ckptmove.io.contracts import ByteSource


def append_records(source: ByteSource, directory: ZipDirectory, alignment: int, new: Mapping[int, NewRecord]) -> bytes:
    """The tail that replaces records, by their place in the directory, of an archive without a tail."""
    undo = UndoRecord(source.size, directory.start, zlib.crc32(directory.records.raw + directory.trailer))
    return Layout(LocalHeaders(source, directory), alignment).append(new, undo.encode())
