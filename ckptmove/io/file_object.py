"""Read a checkpoint from a file object: an open binary file, or bytes in memory."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import BinaryIO, ClassVar, Final

from ckptmove.errors import AccessFailed, SourceChanged, UsageError, reason_of
from ckptmove.io.locations import OpenFile
from ckptmove.io.part import BlocksByRead, check_within
from ckptmove.io.source import read_exactly

_END: Final = 2


def location_of(file: BinaryIO) -> str:
    """The path of an open file that still has its name; else the file object itself, as an :class:`OpenFile`."""
    try:
        is_readable = isinstance(file.read(0), bytes) and file.seekable()
    except (OSError, ValueError) as error:
        raise UsageError(f"the file object cannot be read: {reason_of(error)}") from error
    if not is_readable:
        raise UsageError("a file object must be binary and seekable: pass io.BytesIO(file.read())")
    name = getattr(file, "name", None)
    with suppress(OSError, ValueError):
        if isinstance(name, str) and os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
            return name
    return OpenFile(file)


class FileObjectSource(BlocksByRead):
    """The bytes of a file object."""

    is_remote: ClassVar[bool] = False

    def __init__(self, named: OpenFile) -> None:
        self.path: str = named
        self._file = named.file
        self.size = self._file.seek(0, _END)

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive)."""
        check_within(self, start, end)
        try:
            return read_exactly(self._read_piece, self.path, start, end)
        except (OSError, ValueError) as error:
            raise AccessFailed(self.path, reason_of(error)) from error

    def require_unchanged(self) -> None:
        """Raise SourceChanged if the length of the object has changed."""
        if self._file.seek(0, _END) != self.size:
            raise SourceChanged(self.path)

    def _read_piece(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)

    def close(self) -> None:
        """Do nothing: the owner closes the object."""
