"""Read the shards of torch's HuggingFaceStorageWriter: assemble each tensor from the files of all ranks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

from ckptmove.assembled.hf_table import absent_shards, sharded_tensor
from ckptmove.assembled.part import AssembledPart
from ckptmove.assembled.table import OpenChunk, Placed, TableEntry
from ckptmove.checkpoint.directories import FileRecord
from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.inventory.build import machine_inventory
from ckptmove.checkpoint.merge import moved_inventory
from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.parts import read_file
from ckptmove.errors import DamagedArchive
from ckptmove.formats.rebuild_calls import plain_table_machine, table_machine
from ckptmove.formats.safetensors_file import SafetensorsFile
from ckptmove.formats.safetensors_shards import chunk_at, chunk_offsets, shard_name
from ckptmove.lazy.stored import StoredBytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptmove.assembled.hf_table import ShardedTensor
    from ckptmove.checkpoint.open_files import OpenFiles
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.io.contracts import ByteSource
    from ckptmove.io.listing import ListedFile, Listing
    from ckptmove.limits import Limits
    from ckptmove.model import Span
    from ckptmove.pickles.tree import Value


class ShardsFolder(NamedTuple):
    """A folder with shards."""

    path: str  # its path in the directory; empty for the directory itself
    files: tuple[ListedFile, ...]  # its shards

    @property
    def parent(self) -> str:
        """The path of the folder around it, where torch writes the consolidated files."""
        return self.path.rpartition("/")[0]

    def is_consolidated(self, tensors: Mapping[str, ShardedTensor], others: Iterable[OpenPart]) -> bool:
        """Whether files in the folder around the shards have all their tensors, as torch consolidates them."""
        whole: dict[str, tuple[str, tuple[int, ...]]] = {}
        for other in others if self.path else ():
            if other.name.rpartition("/")[0] == self.parent and not other.is_distributed:
                whole |= {other.own_name(one.name): (one.dtype, one.shape) for one in other.inventory.tensors}
        return all(whole.get(name) == (tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def find_shards(listing: Listing) -> tuple[ShardsFolder, ...]:
    """The folders with shards in a directory; in an archive each file is read by itself."""
    found: dict[str, list[ListedFile]] = {}
    for file in () if listing.form else listing.files:
        if not file.is_hidden and shard_name(file.name) is not None:
            found.setdefault(file.folder, []).append(file)
    return tuple(ShardsFolder(path, tuple(files)) for path, files in sorted(found.items()))


class ShardsPart(AssembledPart):
    """The shards of one folder."""

    is_distributed = True
    has_checksums = False

    def __init__(self, folder: ShardsFolder, files: OpenFiles, limits: Limits, base: int) -> None:
        """Read the tables of all shards, which have no sites."""
        super().__init__()
        listing = files.listing
        self.name, self.path, self.base = folder.path, listing.full(folder.path).rstrip("/"), base
        self._folder, self._files, self._limits = folder, files, limits
        pieces: dict[str, list[Placed]] = {}
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
                    span = container.storage_span(key)  # a safetensors file has all bytes of its tensors
                    pieces.setdefault(key, []).append(Placed(chunk, file.name, span, local=record, name=key))
        with naming(self.path):
            self.tensors = {name: sharded_tensor(name, own, self.path) for name, own in pieces.items()}
            facts = tuple(absent_shards(self.tensors, [file.name for file in folder.files], self.path))
            machine = plain_table_machine(self._table_rows(), limits, self._letters)
            own = machine_inventory(machine, SafetensorsFile.name, limits, keep_tree=False)
        size_bytes = sum(file.size_bytes for file in folder.files)
        own = replace(own, path=self.path, layout="sharded", size_bytes=size_bytes, facts=facts)
        self.inventory = moved_inventory(folder.path, own, base)
        self.rows = tuple(
            FileRecord(
                path=file.path,
                roles=tuple(dict.fromkeys(one.role for one in own.tensors)) or ("other",),
                container=SafetensorsFile.name,
                layout="sharded",
                size_bytes=file.size_bytes,
                tensors=counts[file.path],
                devices=tuple(dict.fromkeys(one.device for one in own.tensors)),
                is_piece=True,
            )
            for file in folder.files
        )

    def entry(self, key: str) -> TableEntry:
        tensor = self.tensors[key]
        return TableEntry(tensor.dtype, tensor.shape, tensor.pieces)

    def opened(self, key: str, placed: Placed) -> OpenChunk:
        del key
        stored = StoredBytes(self.source(placed.file), cast("Span", placed.span), "little")
        return OpenChunk(stored, placed.local, SafetensorsFile.name)

    def source(self, file: str) -> ByteSource:
        return self._files.source(f"{self._folder.path}/{file}" if self._folder.path else file)

    def tree(self) -> Value:
        """A state_dict of whole tensors, without a place in any pickle."""
        return table_machine(self._table_rows(), self._limits, self._letters).root

    def budget(self) -> Budget:
        return Budget(self._limits, self.inventory.size_bytes)

    def _table_rows(self) -> Iterable[tuple[str, str, tuple[int, ...]]]:
        return ((name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items())

    @property
    def _letters(self) -> int:
        return sum(map(len, self.tensors))
