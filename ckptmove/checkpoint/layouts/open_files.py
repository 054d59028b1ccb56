"""The files of a directory or an archive as sources that are opened again whenever they are asked.

Never keeps more than a few of them open: there may be thousands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.io.part import check_within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.layouts.listing import Listing
    from ckptmove.io.contracts import ByteSource
    from ckptmove.model import Span

#: A tensor that is cut into columns lies in the files of as many ranks, and is read from all of them in turn.
_MOST_OPEN: Final = 32


class OpenFiles:
    """The files of a listing, of which those that were asked last are open."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._listed = {file.path: file for file in listing.files}
        self._open: dict[str, ByteSource] = {}

    def source(self, path: str) -> ByteSource:
        """A file as a source that nobody has to close.

        Raises:
            MissingFile, AccessFailed, SourceChanged: it cannot be opened, or is not what was listed any more.
        """
        return _Reopened(self, path)

    def at_hand(self, path: str) -> ByteSource:
        """A file, open until some more have been asked for; errors as of :meth:`source`."""
        source = self._open.pop(path, None)
        if source is None:
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            source = self._listing.open(path)
        self._open[path] = source
        if path in self._listed:  # a link stands for a file of the directory, and is not listed itself
            self._listing.require_unchanged(self._listed[path])
        return source

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.popitem()[1].close()


class _Reopened:
    """A file that is opened when it is read.

    Attributes:
        path: the file as it is named to people.
        size: its length in bytes.
    """

    def __init__(self, files: OpenFiles, path: str) -> None:
        source = files.at_hand(path)
        self.path, self.size = source.path, source.size
        self._files, self._name = files, path

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive); errors as of the file."""
        return self._files.at_hand(self._name).read(start, end)

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """The bytes of a span in blocks of at most ``block_bytes``, each valid on its own; errors as of the file."""
        del buffers  # each block has bytes of its own
        check_within(self, span.start, span.end)
        for start in range(span.start, span.end, block_bytes):
            yield memoryview(self.read(start, min(start + block_bytes, span.end)))

    def close(self) -> None:
        """Nothing: whoever has the files closes them."""
