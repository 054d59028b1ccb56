"""Read a checkpoint from a file object: an open binary file, or bytes in memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Final

from ckptmove.errors import AccessFailed, SourceChanged, UsageError, reason_of
from ckptmove.io.part import check_within
from ckptmove.io.source import read_exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.model import Span

_END: Final = 2


class OpenFile(str):
    """The name of a file object in messages, with the object.

    Attributes:
        file: the object, which its owner closes.
    """

    __slots__ = ("file",)

    file: BinaryIO

    def __new__(cls, file: BinaryIO) -> OpenFile:
        """Name a file object by its class."""
        named = super().__new__(cls, f"<{type(file).__name__}>")
        named.file = file
        return named


def location_of(file: BinaryIO) -> str:
    """The path of an open file that still has its name; else the file object itself, as an :class:`OpenFile`."""
    try:
        is_readable = isinstance(file.read(0), bytes) and file.seekable()
    except (OSError, ValueError) as error:
        raise UsageError(f"the file object cannot be read: {reason_of(error)}") from error
    if not is_readable:
        raise UsageError("a file object must be binary and seekable: pass io.BytesIO(file.read())")
    name = getattr(file, "name", None)
    if isinstance(name, str) and _is_file(file, name):
        return name
    return OpenFile(file)


def _is_file(file: BinaryIO, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name))
    except (OSError, ValueError):
        return False


class FileObjectSource:
    """The bytes of a file object.

    Attributes:
        path: its name in messages.
        size: length in bytes when it was opened.
    """

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

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks of at most ``block_bytes``; all of them stay valid."""
        del buffers  # no buffer is reused
        for start in range(span.start, span.end, block_bytes):
            yield memoryview(self.read(start, min(start + block_bytes, span.end)))

    def require_unchanged(self) -> None:
        """Raise SourceChanged if the length of the object has changed."""
        if self._file.seek(0, _END) != self.size:
            raise SourceChanged(self.path)

    def _read_piece(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)

    def close(self) -> None:
        """Do nothing: the owner closes the object."""
