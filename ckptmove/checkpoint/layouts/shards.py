"""Read the shards of torch's HuggingFaceStorageWriter: assemble each tensor from the files of all ranks."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from ckptmove.checkpoint.directories import FileRecord
from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.inventory.build import build_inventory
from ckptmove.checkpoint.layouts.merge import moved_inventory
from ckptmove.checkpoint.layouts.pieced_part import PiecedPart, StoredPiece
from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.parts import read_file
from ckptmove.errors import DamagedArchive
from ckptmove.formats.safetensors_file import SafetensorsFile
from ckptmove.formats.safetensors_shards import (
    SafetensorsShards,
    ShardPiece,
    chunk_at,
    chunk_offsets,
    shard_name,
)
from ckptmove.lazy.chunked import Chunked
from ckptmove.lazy.stored import StoredBytes, Strided
from ckptmove.lazy.tensor import Elements
from ckptmove.model import Span
from ckptmove.pickles.rebuild_arguments import contiguous

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptmove.checkpoint.layouts.open_files import OpenFiles
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.formats.safetensors_shards import ShardedTensor
    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.io.listing import ListedFile, Listing
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, TensorRecord
    from ckptmove.pickles.tree import Value


class ShardsFolder(NamedTuple):
    """A folder with shards."""

    path: str  # its path in the directory; empty for the directory itself
    files: tuple[ListedFile, ...]  # its shards

    @property
    def parent(self) -> str:
        """The path of the folder around it, where torch writes the consolidated files."""
        return self.path.rpartition("/")[0]


def find_shards(listing: Listing) -> tuple[ShardsFolder, ...]:
    """The folders with shards in a directory; in an archive each file is read by itself."""
    found: dict[str, list[ListedFile]] = {}
    for file in () if listing.form else listing.files:
        if not file.is_hidden and shard_name(file.name) is not None:
            found.setdefault(file.folder, []).append(file)
    return tuple(ShardsFolder(path, tuple(files)) for path, files in sorted(found.items()))


def is_consolidated(part: ShardsPart, folder: ShardsFolder, others: Iterable[OpenPart]) -> bool:
    """Whether files in the folder around the shards have all their tensors, as torch consolidates them."""
    whole: dict[str, tuple[str, tuple[int, ...]]] = {}
    for other in others if folder.path else ():
        if other.name.rpartition("/")[0] == folder.parent and not other.is_distributed:
            whole |= {other.own_name(one.name): (one.dtype, one.shape) for one in other.inventory.tensors}
    return all(whole.get(name) == (tensor.dtype, tensor.shape) for name, tensor in part.tensors.items())


class ShardsPart(PiecedPart):
    """The shards of one folder."""

    has_checksums = False
    byteorder = sys.byteorder
    pickle_bytes = 0

    def __init__(self, folder: ShardsFolder, files: OpenFiles, limits: Limits, base: int) -> None:
        """Read the tables of all shards, which have no sites."""
        listing = files.listing
        self.name, self.path, self.base = folder.path, listing.full(folder.path).rstrip("/"), base
        self._folder, self._files, self._limits = folder, files, limits
        self._spans: dict[tuple[str, str], Span] = {}
        pieces: dict[str, list[ShardPiece]] = {}
        counts: dict[str, int] = {}
        by_path = {file.path: file for file in folder.files}
        for path in listing.read_ahead(by_path):
            file = by_path[path]
            with naming(listing.full(file.path)), closing(files.source(file.path)) as source:
                container, _, inventory, *_ = read_file(source, limits, tree="inventory")
                if not isinstance(container, SafetensorsFile):
                    raise DamagedArchive(source.path, f"a {container.name} file has the name of a shard")
                offsets = chunk_offsets(container.notes, source.path)
                counts[file.path] = len(inventory.tensors)
                for record in inventory.tensors:
                    key = record.name
                    chunk = chunk_at(key, record.shape, offsets, source.path)
                    pieces.setdefault(key, []).append(ShardPiece(file.name, record.dtype, chunk))
                    # A safetensors file has all bytes of its tensors.
                    self._spans[file.name, key] = cast("Span", container.storage_span(key))
        with naming(self.path):
            self._table = SafetensorsShards(self.path, [file.name for file in folder.files], pieces, limits)
            own = build_inventory(self._table, self._table.read_compact(), limits, keep_tree=False)
        self.tensors: Mapping[str, ShardedTensor] = self._table.tensors
        own = replace(own, layout="sharded", size_bytes=sum(file.size_bytes for file in folder.files))
        self.inventory = moved_inventory(folder.path, own, base)
        self.rows = tuple(
            FileRecord(
                path=file.path,
                roles=tuple(dict.fromkeys(one.role for one in own.tensors)) or ("other",),
                container=self._table.name,
                layout="sharded",
                size_bytes=file.size_bytes,
                tensors=counts[file.path],
                devices=tuple(dict.fromkeys(one.device for one in own.tensors)),
                is_piece=True,
            )
            for file in folder.files
        )

    def close(self) -> None:
        """Do nothing: the files of the directory are closed together."""

    def files_of(self, record: TensorRecord) -> frozenset[str]:
        return frozenset(piece.file for piece in self.tensors[self.own_key(record) or ""].pieces)

    def span(self, key: str) -> Span | None:
        return Span(0, self.tensors[key].nbytes)

    def storage(self, key: str) -> StoredBytes:
        tensor = self.tensors[key]
        chunks = [piece.chunk for piece in tensor.pieces]
        whole = Chunked(tensor.shape, tensor.dtype, chunks, lambda place: self._chunk(key, tensor.pieces[place]))
        return StoredBytes(Elements(whole), Span(0, tensor.nbytes), self.byteorder)

    def pieces_of(self, key: str) -> Iterator[StoredPiece]:
        for piece in self.tensors[key].pieces:
            yield StoredPiece(self._source(piece.file), piece.file, self._table.name, piece.chunk, key)

    def tree(self) -> Value:
        return self._table.read().root

    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """The facts so far: safetensors has no CRCs."""
        del progress, jobs
        return self.inventory.facts

    def budget(self) -> Budget:
        return Budget(self._limits, self.inventory.size_bytes)

    def extras(self) -> Mapping[str, bytes]:
        """Return nothing: the metadata of shards is about their chunks."""
        return {}

    def _chunk(self, key: str, piece: ShardPiece) -> Strided:
        sizes, span = piece.chunk.sizes, self._spans[piece.file, key]
        storage = StoredBytes(self._source(piece.file), span, "little")
        return Strided(storage, self.tensors[key].dtype, sizes, contiguous(sizes))

    def _source(self, file: str) -> ByteSource:
        return self._files.source(f"{self._folder.path}/{file}" if self._folder.path else file)
