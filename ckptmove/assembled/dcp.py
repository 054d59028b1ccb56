"""A distributed checkpoint as a part of a checkpoint: each tensor is assembled from its pieces.

A piece is opened when it is read, and compared with the chunk that ``.metadata`` describes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, cast

from ckptmove.assembled.dcp_folder import check_pieces, file_records, pieces_of_files
from ckptmove.assembled.dcp_pieces import (
    DAMAGE,
    check_piece,
    chunk_in,
    damaged_piece,
    open_chunk,
)
from ckptmove.assembled.part import AssembledPart
from ckptmove.assembled.table import OpenChunk, Placed, TableEntry
from ckptmove.checkpoint.elements import extent_span, overlaps
from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.inventory.outline import outline as make_outline
from ckptmove.checkpoint.merge import moved_inventory
from ckptmove.checkpoint.naming import naming
from ckptmove.errors import CrcMismatch
from ckptmove.formats.chunks import Chunk
from ckptmove.formats.dcp.metadata import StoredObject
from ckptmove.formats.dcp.pieces import Piece
from ckptmove.lazy.stored import StoredBytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptmove.assembled.dcp_folder import PiecesOfFile, ReadFolder
    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.checkpoint.open_files import OpenFiles
    from ckptmove.formats.contract import Container
    from ckptmove.formats.dcp.metadata import StoredTensor
    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, OptimizerRecord, Span, TensorRecord
    from ckptmove.pickles.tree import Value

_BLOCK: Final = 1 << 20
#: Pieces of a tensor that are kept open: those of a few hundred ranks.
_MOST_OPEN: Final = 1024


class DistributedPart(AssembledPart):
    """A ``.metadata`` and the files next to it."""

    is_distributed = True

    def __init__(self, read: ReadFolder, files: OpenFiles, limits: Limits, base: int = 0) -> None:
        """Hold a folder that was read, as a part of a directory; ``base`` is added to its sites."""
        super().__init__()
        folder = read.folder
        self.name, self.path, self.base = folder.path, read.inventory.path, base
        whole = moved_inventory(folder.path, read.inventory, base)
        self.rows = file_records(folder, read.container, whole)
        self._undamaged = whole.facts
        damage = tuple(fact.below(folder.path) for fact in read.damage)
        self.inventory = replace(whole, facts=whole.facts + damage)
        self._folder, self._files, self._limits = folder, files, limits
        self._container = container = read.container
        self.metadata = container.metadata
        self._tensors = {tensor.name: tensor for tensor in container.metadata.tensors}
        names = (one.name for one in container.metadata.entries if isinstance(one, StoredObject))
        self._names = dict.fromkeys(names)
        #: Names of the objects with storages, and the keys of these there, by their keys in the checkpoint.
        self._in_objects = {
            key: (name, own) for name, one in container.objects.items() for key, own in one.storages.items()
        }
        lost = sorted(map(self.full_name, self.lost()))
        own = (_with_obstacle(optimizer, lost) for optimizer in self.inventory.optimizers)
        self.inventory = replace(self.inventory, optimizers=tuple(own))
        #: Why a piece of a tensor is damaged, by its name.
        self._damage: dict[str, str] = {}
        # Each piece is read several times: for its kind, its checksums and its elements.
        self._open = lru_cache(_MOST_OPEN)(self._open_piece)

    @cached_property
    def has_checksums(self) -> bool:
        """Whether the first whole piece in each of its files has CRCs; one process writes a whole file."""
        for _, pieces in self._container.whole_pieces():
            chunks = (piece for piece in pieces if piece.offsets is not None and self._chunk(piece) is not None)
            first = next(chunks, None)
            if first is not None and not self._stream(first).has_checksums():
                return False
        return True

    def close(self) -> None:
        self._container.objects.clear()
        self._open.cache_clear()

    def note(self, facts: Iterable[ArchiveFact]) -> None:
        """Add facts about its files."""
        found = tuple(fact.below(self.name) for fact in facts)
        self._undamaged += found
        self.inventory = replace(self.inventory, facts=self.inventory.facts + found)

    @property
    def jobs(self) -> int:
        """Number of its files to read at a time."""
        return self._files.listing.jobs

    def is_near(self, file: str) -> bool:
        """Whether any number of short reads of a file takes at most two requests."""
        if not self._files.listing.is_remote:
            return True
        from ckptmove.io.remote.source import WINDOW

        return self._container.sizes[file] <= 2 * WINDOW

    def entry(self, key: str) -> TableEntry:
        if key in self._in_objects:
            name, own = self._in_objects[key]
            piece = cast("Piece", self._container.object_piece(name))  # the object was read
            return TableEntry("", (), (Placed(Chunk((), ()), piece.file, piece.span, own),), is_storage=True)
        tensor = self._tensors[key]
        return TableEntry(tensor.dtype, tensor.shape, self._placed(tensor))

    def opened(self, key: str, placed: Placed) -> OpenChunk | None:
        piece = self._piece(key, placed)
        return self._in_object(piece, placed.key) if piece.offsets is None else self._chunk(piece)

    def check_chunk(self, key: str, placed: Placed) -> None:
        piece, source = self._piece(key, placed), self.source(placed.file)
        for fact in check_piece(source, piece, self._container, self._limits):
            raise CrcMismatch(source.path, fact.record)

    def source(self, file: str) -> ByteSource:
        return self._files.source(self._folder.full(file))

    def objects(self) -> Iterator[tuple[str, Placed, str]]:
        for name, found in self._container.objects.items():
            piece = self._container.object_piece(name)
            if piece is not None and found.kind is not None:
                yield name, Placed(Chunk((), ()), piece.file, piece.span), found.kind

    def object_of(self, record: TensorRecord) -> tuple[str, str] | None:
        name, _ = self._in_objects.get(self.own_key(record) or "", ("", ""))
        return (name, self.own_name(record.name)[len(name) + 1 :]) if name else None

    def tree(self) -> Value:
        return self._container.read_whole().root

    def outline(self) -> tuple[OutlineLine, ...]:
        machine = self._container.read_whole()
        return make_outline(machine.root, self._limits, machine.end)

    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """All facts about its bytes, after comparing every piece with its CRCs and with ``.metadata``."""
        found = check_pieces(self._files.listing, self._folder, self._container, self._limits, progress, jobs)
        return (*self._undamaged, *(fact.below(self.name) for fact in found))

    def pieces_of_files(self) -> Mapping[str, PiecesOfFile]:
        """The pieces in each file, by the path of the file in the directory."""
        return pieces_of_files(self._folder, self._container)

    def budget(self) -> Budget:
        return Budget(self._limits, self._container.metadata_bytes)

    def extras(self) -> Mapping[str, bytes]:
        """SHA-256 of each object that is not in the tree, because only its class reads its bytes."""
        return self._digests

    def lost(self) -> tuple[str, ...]:
        """Names of objects whose bytes are missing or damaged."""
        return tuple(
            name
            for name in self._names
            if self._container.object_piece(name) is None or name in self._container.damaged
        )

    def why_not(self, record: TensorRecord) -> str:
        return self._damage.get(self.own_key(record) or "") or super().why_not(record)

    @cached_property
    def _digests(self) -> dict[str, bytes]:
        found = {}
        for name, one in self._container.objects.items():
            piece = self._container.object_piece(name)
            if piece is not None and one.machine is None:
                digest = hashlib.sha256()
                for block in self.source(piece.file).blocks(piece.span, _BLOCK):
                    digest.update(block)
                found[name] = digest.digest()
        return found

    def _placed(self, tensor: StoredTensor) -> Iterator[Placed]:
        """The chunks of a tensor whose pieces end within their files."""
        there = self._container.pieces_of(tensor.name)
        for chunk in tensor.chunks:
            if chunk.offsets in there:
                piece = there[chunk.offsets]
                yield Placed(chunk, piece.file, piece.span)

    def _piece(self, key: str, placed: Placed) -> Piece:
        """The piece with a chunk, or with the storage of an object."""
        span = cast("Span", placed.span)
        if key in self._in_objects:
            return Piece(self._in_objects[key][0], None, placed.file, span)
        return Piece(key, placed.chunk.offsets, placed.file, span)

    def _stream(self, piece: Piece) -> Container:
        """The ``torch.save`` in a piece."""
        return open_chunk(self.source(piece.file), piece, self._container, self._limits)

    def _in_object(self, piece: Piece, own: str) -> OpenChunk:
        """The storage of an object by its key there."""
        stream = self._stream(piece)
        span = cast("Span", stream.storage_span(own))  # it was found when the object was read
        return OpenChunk(StoredBytes(stream.source, span, stream.byteorder), None, stream.name)

    def _chunk(self, piece: Piece) -> OpenChunk | None:
        """The piece of a chunk; None if it is not the expected chunk."""
        try:
            with naming(self.source(piece.file).path):
                return self._open(piece)
        except DAMAGE as error:
            self._damage.setdefault(piece.name, str(error))
            return None

    def _open_piece(self, piece: Piece) -> OpenChunk:
        source, stream = self.source(piece.file), self._stream(piece)
        (record,) = chunk_in(stream, source, piece, self._container, self._limits)
        span = None if record.storage is None else stream.storage_span(record.storage)
        # One stored element may have many places in an expanded tensor.
        if span is None or extent_span(span, record) is None or overlaps(record):
            raise damaged_piece(source, piece, "is compressed, incomplete, or has overlapping elements")
        return OpenChunk(StoredBytes(stream.source, span, stream.byteorder), record, stream.name)


def _with_obstacle(optimizer: OptimizerRecord, lost: Sequence[str]) -> OptimizerRecord:
    """The optimizer; with an obstacle if one of its options or counters is among the lost objects, which are sorted."""
    prefix = f"{optimizer.where}." if optimizer.where else ""
    for own in (f"{prefix}param_groups", f"{prefix}state."):
        place = bisect_left(lost, own)
        if place < len(lost) and lost[place].startswith(own):
            return optimizer._replace(algorithm=None, obstacle=f"{lost[place]} is missing or damaged")
    return optimizer
