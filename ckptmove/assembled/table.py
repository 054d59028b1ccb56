"""The table of an assembled checkpoint: the chunks of each tensor, and their places in the files."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.formats.chunks import Chunk
    from ckptmove.lazy.stored import StoredBytes
    from ckptmove.model import Span, TensorRecord


class Placed(NamedTuple):
    """A chunk of a tensor, and its place in a file."""

    chunk: Chunk  # its part of the tensor
    file: str  # its file, by its path in the folder of the part
    span: Span | None = None  # its bytes in the file, a file of their own without a `name`; None if `key` tells them
    key: str = ""  # key of its storage in the file; empty if it is unknown until the file is open
    local: TensorRecord | None = None  # the chunk as a view of that storage; None as for `key`, or for all of it
    name: str = ""  # name of the tensor that torch loads from the file; empty if the file is the tensor
    offsets: tuple[int, ...] = ()  # first index of the chunk in that tensor; empty if the chunk is all of it

    @property
    def where(self) -> str:
        """Its place in words."""
        return self.file if self.name or self.span is None else f"{self.file} at byte {self.span.start}"


class TableEntry(NamedTuple):
    """A row of the table: a tensor in chunks, or the storage of one file."""

    dtype: str  # torch's name without `torch.`
    shape: tuple[int, ...]  # shape of the whole tensor
    placed: Iterable[Placed]  # its chunks in the files, with those of replicas and those without elements
    is_storage: bool = False  # whether it is the storage of one file, with any views, and not a tensor


class OpenChunk(NamedTuple):
    """A chunk in an open file."""

    storage: StoredBytes  # bytes of the storage in the file
    local: TensorRecord | None  # the chunk as a view of the storage; None for all of the storage
    container: str  # format of the file or the piece
