"""The base class of parts whose tensors are stored in pieces, in several files."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.parts import OpenPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptmove.assembled.distributed import PiecesOfFile
    from ckptmove.formats.chunks import Chunk
    from ckptmove.io.contracts import ByteSource
    from ckptmove.model import TensorRecord


class StoredPiece(NamedTuple):
    """The file of a chunk or of an object."""

    source: ByteSource  # its bytes
    place: str  # its file, and its offset or name there, in words
    kind: str  # its container
    chunk: Chunk  # its part of the tensor; for an object, a chunk without axes
    name: str = ""  # name of the chunk in a file of several tensors; empty if the file is the chunk


class PiecedPart(OpenPart):
    """A part whose tensors are assembled from pieces."""

    is_distributed = True
    is_assembled = True

    @abstractmethod
    def pieces_of(self, key: str) -> Iterable[StoredPiece]:
        """The pieces of a tensor by its name, except those without elements; all of them are complete."""

    @abstractmethod
    def files_of(self, record: TensorRecord) -> frozenset[str]:
        """The names of the files with pieces of a tensor."""

    def require_sound(self, key: str) -> None:
        """Compare the pieces of a tensor with their CRCs, if they have any."""

    def objects(self) -> Iterable[tuple[str, StoredPiece]]:
        """Pieces of objects that are not tensors, by name, except missing ones and those that wrote their own bytes."""
        return ()

    def object_of(self, record: TensorRecord) -> tuple[str, str] | None:
        """The object that holds a tensor, and the path of the tensor in it; None for a tensor of its own."""
        del record
        return None

    def pieces_of_files(self) -> Mapping[str, PiecesOfFile]:
        """The pieces with CRCs in each file, by the path of the file in the directory."""
        return {}
