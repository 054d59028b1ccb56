"""A folder of torch.distributed.checkpoint as a part of a checkpoint: each tensor put together from its pieces.

Never opens a piece before it is asked for, and never takes one for the chunk that it should be without looking.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint import naming
from ckptmove.containers.chunks import Chunk
from ckptmove.containers.distributed_metadata import StoredObject
from ckptmove.dtypes import ITEM_BYTES
from ckptmove.elements import StoredBytes, extent, overlaps
from ckptmove.inventory.budget import Budget
from ckptmove.layouts.assembled import AssembledTensor, ChunkElements
from ckptmove.layouts.distributed import chunk_in, damaged_piece, open_chunk, open_object, read_object
from ckptmove.layouts.stored_part import StoredPart
from ckptmove.model import Span
from ckptmove.streams.part import PartSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.containers.distributed import DistributedCheckpoint
    from ckptmove.containers.distributed_metadata import Piece, StoredTensor
    from ckptmove.contracts import ByteSource
    from ckptmove.layouts.distributed import DistributedFolder
    from ckptmove.layouts.open_files import OpenFiles
    from ckptmove.limits import Limits
    from ckptmove.model import ContainerName, Inventory
    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value

_BLOCK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """The ``torch.save`` of a chunk, or of an object.

    Attributes:
        source: its bytes.
        place: for people: its file, and where it begins in that.
        kind: what it is.
        chunk: which part of its tensor it is; of an object, one without axes.
    """

    source: ByteSource
    place: str
    kind: ContainerName
    chunk: Chunk


class DistributedPart(StoredPart):
    """A ``.metadata`` and the files beside it."""

    is_distributed = True
    byteorder = sys.byteorder
    disk = None

    def __init__(
        self,
        inventory: Inventory,
        folder: DistributedFolder,
        container: DistributedCheckpoint,
        files: OpenFiles,
        limits: Limits,
        base: int = 0,
    ) -> None:
        """Hold what was read of a folder.

        Args:
            inventory: what it holds, in the terms of the whole.
            folder: the folder.
            container: what its ``.metadata`` says.
            files: those of the whole directory.
            limits: what a piece may ask for.
            base: what was added to its sites.
        """
        self.name, self.path, self.inventory, self.base = folder.path, inventory.path, inventory, base
        self._folder, self._container, self._files, self._limits = folder, container, files, limits
        self._tensors = {tensor.name: tensor for tensor in container.metadata.tensors}
        names = (one.name for one in container.metadata.entries if isinstance(one, StoredObject))
        self._names = dict.fromkeys(names)
        # Of two places of one chunk the last counts, as in the dict that torch makes of them.
        self._pieces = {(piece.name, piece.offsets): piece for piece in container.metadata.pieces}

    @cached_property
    def has_checksums(self) -> bool:
        """Whether the first piece in each of its files holds CRCs: one process writes all of a file."""
        first: dict[str, Piece] = {}
        for piece in self._container.whole_pieces():
            if piece.offsets is not None:
                first.setdefault(piece.file, piece)
        return all(open_chunk(self._source(one), one, self._limits).has_checksums() for one in first.values())

    def span(self, key: str) -> Span | None:
        """The bytes of a tensor by its name, as if they lay in one run; None where some are lost."""
        tensor = self._tensors[key]
        return None if self._found(tensor) is None else Span(0, prod(tensor.shape) * ITEM_BYTES[tensor.dtype])

    def storage(self, key: str) -> StoredBytes | None:
        """The bytes of a tensor by its name, as if they lay in one run; None where some are lost."""
        tensor, span = self._tensors[key], self.span(key)
        found = self._found(tensor)
        if found is None or span is None:
            return None
        chunks, pieces = [chunk for chunk, _ in found], [piece for _, piece in found]
        whole = AssembledTensor(tensor.shape, tensor.dtype, chunks, lambda place: self._chunk(pieces[place]))
        return StoredBytes(whole, span, self.byteorder)

    def pieces_of(self, key: str) -> Iterator[StoredPiece]:
        """The pieces of a tensor by its name, of which none is lost; those without elements are left out."""
        for chunk, piece in self._found(self._tensors[key]) or ():
            source = self._source(piece)
            with naming(source.path):
                kind = open_chunk(source, piece, self._limits).name
            yield StoredPiece(PartSource(source, piece.span), _place(piece), kind, chunk)

    def objects(self) -> Iterator[tuple[str, StoredPiece]]:
        """The pieces of what is no tensor, by name; what is cut off, or wrote its own bytes, is left out."""
        for name in self._names:
            piece = self._piece(name, None)
            if piece is None:
                continue
            source = self._source(piece)
            with naming(source.path):
                stream = open_object(source, piece, self._limits)
            if stream is not None:
                yield name, StoredPiece(PartSource(source, piece.span), _place(piece), stream.name, Chunk((), ()))

    def tree(self) -> Value:
        """The object that was saved, nested as its keys tell, with what is no tensor in its place."""
        machines = {name: machine for name, machine, _ in self._objects() if machine is not None}
        return self._container.read_with(machines).root

    def budget(self) -> Budget:
        """What one walk over the tree may ask for."""
        return Budget(self._limits, self._container.source.size)

    def extras(self) -> Mapping[str, bytes]:
        """The SHA-256 of each object whose content is not in the tree: it wrote its own bytes, or has tensors in it."""
        return self._digests

    def lost(self) -> tuple[str, ...]:
        """Names of the objects whose bytes are not there."""
        return tuple(name for name in self._names if self._piece(name, None) is None)

    def stands_for_more(self, shown: str) -> bool:
        """False: in the tree, what is not there stands for itself."""
        del shown
        return False

    @cached_property
    def _digests(self) -> dict[str, bytes]:
        return {name: digest for name, machine, digest in self._objects() if machine is None}

    def _objects(self) -> Iterator[tuple[str, Machine | None, bytes]]:
        """Each object by name, with its pickle, or else, where its content is not in one, with its SHA-256."""
        for name in self._names:
            piece = self._piece(name, None)
            if piece is None:
                continue
            source = self._source(piece)
            machine = read_object(source, piece, self._limits)
            if machine is not None:
                yield name, machine, b""
                continue
            digest = hashlib.sha256()
            for block in source.blocks(piece.span, _BLOCK):
                digest.update(block)
            yield name, None, digest.digest()

    def _found(self, tensor: StoredTensor) -> list[tuple[Chunk, Piece]] | None:
        """The chunks of a tensor that have elements, with their pieces; None where some of them are lost."""
        chunks = {chunk.offsets: chunk for chunk in tensor.chunks if chunk.volume}.values()
        found = [(chunk, piece) for chunk in chunks if (piece := self._piece(tensor.name, chunk.offsets)) is not None]
        return None if len(found) < len(chunks) or tensor.uncovered > 0 else found

    def _piece(self, name: str, offsets: tuple[int, ...] | None) -> Piece | None:
        """The piece of a chunk or an object; None where it is not all there."""
        piece = self._pieces.get((name, offsets))
        return None if piece is None or piece.span.end > self._container.sizes[piece.file] else piece

    def _chunk(self, piece: Piece) -> ChunkElements:
        source = self._source(piece)
        with naming(source.path):
            stream = open_chunk(source, piece, self._limits)
            (record,) = chunk_in(stream, source, piece, self._container, self._limits)
        span = None if record.storage is None else stream.storage_span(record.storage)
        stored = None if span is None else StoredBytes(stream.source, span, stream.byteorder)
        place = None if stored is None else extent(stored, record)
        if stored is None or place is None or overlaps(record):  # of a few bytes, an expanded one makes any number
            raise damaged_piece(source, piece, "does not hold all of its elements plainly")
        return ChunkElements(stored, record, place)

    def _source(self, piece: Piece) -> ByteSource:
        return self._files.source(self._folder.full(piece.file))


def _place(piece: Piece) -> str:
    """Where a piece lies, for people."""
    return f"{piece.file} at byte {piece.span.start}"
