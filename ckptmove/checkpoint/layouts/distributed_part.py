"""A distributed checkpoint as a part of a checkpoint: each tensor is assembled from its pieces.

A piece is opened when it is read, and compared with the chunk that ``.metadata`` describes.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Final, cast

from ckptmove.checkpoint.elements import overlaps
from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.inventory.outline import outline as make_outline
from ckptmove.checkpoint.layouts.distributed import check_pieces, file_records, pieces_of_files
from ckptmove.checkpoint.layouts.distributed_pieces import (
    DAMAGE,
    check_piece,
    chunk_in,
    damaged_piece,
    limits_of,
    open_chunk,
)
from ckptmove.checkpoint.layouts.merge import moved_inventory
from ckptmove.checkpoint.layouts.pieced_part import PiecedPart, StoredPiece
from ckptmove.checkpoint.naming import naming
from ckptmove.errors import CrcMismatch
from ckptmove.formats.chunks import Chunk
from ckptmove.formats.dcp.metadata import StoredObject
from ckptmove.io.part import PartSource
from ckptmove.lazy.chunked import Chunked
from ckptmove.lazy.stored import StoredBytes, stored_tensor
from ckptmove.lazy.tensor import Elements
from ckptmove.model import Span
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptmove.checkpoint.inventory.outline import OutlineLine
    from ckptmove.checkpoint.layouts.distributed import PiecesOfFile, ReadFolder
    from ckptmove.checkpoint.layouts.open_files import OpenFiles
    from ckptmove.formats.dcp.metadata import DistributedMetadata, StoredTensor
    from ckptmove.formats.dcp.pieces import Piece
    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.lazy.tensor import LazyTensor
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, OptimizerRecord, TensorRecord
    from ckptmove.pickles.tree import Value

_BLOCK: Final = 1 << 20
#: Pieces of a tensor that are kept open: those of a few hundred ranks.
_MOST_OPEN: Final = 1024


class DistributedPart(PiecedPart):
    """A ``.metadata`` and the files next to it."""

    byteorder = sys.byteorder

    def __init__(self, read: ReadFolder, files: OpenFiles, limits: Limits, base: int = 0) -> None:
        """Hold a folder that was read, as a part of a directory; ``base`` is added to its sites."""
        folder = read.folder
        self.name, self.path, self.base = folder.path, read.inventory.path, base
        whole = moved_inventory(folder.path, read.inventory, base)
        self.rows = file_records(folder, read.container, whole)
        self._undamaged = whole.facts
        damage = tuple(fact.below(folder.path) for fact in read.damage)
        self.inventory = replace(whole, facts=whole.facts + damage)
        self._folder, self._files, self._limits = folder, files, limits
        self._container = container = read.container
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
        #: Container of each piece that was opened; None if it is damaged, for the reason in ``_damage``.
        self._kinds_of: dict[tuple[str, int], str | None] = {}
        self._damage: dict[str, str] = {}
        # Each piece is read several times: for its kind, its checksums and its elements.
        self._open = lru_cache(_MOST_OPEN)(self._read_piece)

    @property
    def metadata(self) -> DistributedMetadata:
        """Contents of ``.metadata``."""
        return self._container.metadata

    @cached_property
    def has_checksums(self) -> bool:
        """Whether the first whole piece in each of its files has CRCs; one process writes a whole file."""
        for _, pieces in self._container.whole_pieces():
            chunks = (piece for piece in pieces if piece.offsets is not None and self._kind_of(piece) is not None)
            first = next(chunks, None)
            if first is not None and not open_chunk(self._source(first), first, self._limits).has_checksums():
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

    def files_of(self, record: TensorRecord) -> frozenset[str]:
        """The names of the files with pieces of a tensor."""
        key = self.own_key(record) or ""
        if key in self._in_objects:
            return frozenset({self._holder(key).file})
        tensor = self._tensors[key]
        placed, chunks = self._container.metadata.pieces.of(tensor.name), {chunk.offsets for chunk in tensor.chunks}
        return frozenset(piece.file for offsets, piece in placed.items() if offsets in chunks)

    def only_piece(self, record: TensorRecord) -> Piece | None:
        """The piece of a tensor that is stored whole; None if it is in several pieces, in an object, or not there."""
        pieces = [*self._container.pieces_of(self.own_key(record) or "").values()]
        return pieces[0] if len(pieces) == 1 and pieces[0].offsets is not None else None

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

    def span(self, key: str) -> Span | None:
        """Bytes of a tensor by its name, as if they were contiguous; None if some are missing."""
        if key in self._in_objects:
            return self._in_object(key).span
        tensor = self._tensors[key]
        return None if self._found(tensor) is None else Span(0, prod(tensor.shape) * ITEM_BYTES[tensor.dtype])

    def storage(self, key: str) -> StoredBytes | None:
        if key in self._in_objects:
            return self._in_object(key)
        tensor, span = self._tensors[key], self.span(key)
        found = self._found(tensor)
        if found is None or span is None:
            return None
        chunks, pieces = [chunk for chunk, _ in found], [piece for _, piece in found]
        whole = Chunked(tensor.shape, tensor.dtype, chunks, lambda place: self._chunk(pieces[place]))
        return StoredBytes(Elements(whole), span, self.byteorder)

    def pieces_of(self, key: str) -> Iterator[StoredPiece]:
        """The pieces of a tensor by its name, except those without elements; all of them are complete."""
        for chunk, piece in self._found(self._tensors[key]) or ():
            kind = cast("str", self._kind_of(piece))  # _found returns only known kinds
            yield StoredPiece(PartSource(self._source(piece), piece.span), _place(piece), kind, chunk)

    def require_sound(self, key: str) -> None:
        """Compare the pieces of a tensor with their CRCs."""
        pieces = (
            [self._holder(key)]
            if key in self._in_objects
            else [piece for _, piece in self._found(self._tensors[key]) or ()]
        )
        for piece in pieces:
            source = self._source(piece)
            for fact in check_piece(source, piece, self._container, limits_of(piece, self._limits, self._container)):
                raise CrcMismatch(source.path, fact.record)

    def objects(self) -> Iterator[tuple[str, StoredPiece]]:
        """Pieces of objects that are not tensors, by name, except missing ones and those that wrote their own bytes."""
        for name, found in self._container.objects.items():
            piece = self._container.object_piece(name)
            if piece is not None and found.kind is not None:
                place = PartSource(self._source(piece), piece.span), _place(piece)
                yield name, StoredPiece(*place, found.kind, Chunk((), ()))

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
                for block in self._source(piece).blocks(piece.span, _BLOCK):
                    digest.update(block)
                found[name] = digest.digest()
        return found

    def _found(self, tensor: StoredTensor) -> list[tuple[Chunk, Piece]] | None:
        """The chunks of a tensor that have elements, with their pieces; None if some are missing or damaged."""
        chunks = {chunk.offsets: chunk for chunk in tensor.chunks if chunk.volume}.values()
        placed = self._container.pieces_of(tensor.name)
        found = [(chunk, placed[chunk.offsets]) for chunk in chunks if chunk.offsets in placed]
        if len(found) < len(chunks) or tensor.uncovered > 0:
            return None
        return None if any(self._kind_of(piece) is None for _, piece in found) else found

    def _kind_of(self, piece: Piece) -> str | None:
        """Container of the piece of a chunk; None if it is not the expected chunk."""
        place = piece.file, piece.span.start
        if place not in self._kinds_of:
            kind = None
            try:
                with naming(self._source(piece).path):
                    kind = self._open(piece)[0]
            except DAMAGE as error:
                self._damage.setdefault(piece.name, str(error))
            self._kinds_of[place] = kind
        return self._kinds_of[place]

    def _holder(self, key: str) -> Piece:
        """The piece of the object with a storage."""
        return cast("Piece", self._container.object_piece(self._in_objects[key][0]))  # the object was read

    def _in_object(self, key: str) -> StoredBytes:
        """Bytes of a storage of an object."""
        piece = self._holder(key)
        stream = open_chunk(self._source(piece), piece, limits_of(piece, self._limits, self._container))
        return StoredBytes(stream.source, cast("Span", stream.storage_span(self._in_objects[key][1])), self.byteorder)

    def _chunk(self, piece: Piece) -> LazyTensor:
        with naming(self._source(piece).path):
            return self._open(piece)[1]

    def _read_piece(self, piece: Piece) -> tuple[str, LazyTensor]:
        """Open the piece of a chunk: its container, and its tensor."""
        source = self._source(piece)
        limits = limits_of(piece, self._limits, self._container)
        stream = open_chunk(source, piece, limits)
        (record,) = chunk_in(stream, source, piece, self._container, limits)
        span = None if record.storage is None else stream.storage_span(record.storage)
        stored = None if span is None else StoredBytes(stream.source, span, stream.byteorder)
        tensor = None if stored is None else stored_tensor(stored, record)
        # One stored element may have many places in an expanded tensor.
        if tensor is None or overlaps(record):
            raise damaged_piece(source, piece, "is compressed, incomplete, or has overlapping elements")
        return stream.name, tensor

    def _source(self, piece: Piece) -> ByteSource:
        return self._files.source(self._folder.full(piece.file))


def _place(piece: Piece) -> str:
    """Place of a piece in words."""
    return f"{piece.file} at byte {piece.span.start}"


def _with_obstacle(optimizer: OptimizerRecord, lost: Sequence[str]) -> OptimizerRecord:
    """The optimizer; with an obstacle if one of its options or counters is among the lost objects, which are sorted."""
    prefix = f"{optimizer.where}." if optimizer.where else ""
    for own in (f"{prefix}param_groups", f"{prefix}state."):
        place = bisect_left(lost, own)
        if place < len(lost) and lost[place].startswith(own):
            return optimizer._replace(algorithm=None, obstacle=f"{lost[place]} is missing or damaged")
    return optimizer
