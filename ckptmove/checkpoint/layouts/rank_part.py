"""Files of several ranks as one part of a checkpoint: DTensors and ShardedTensors are assembled from their shards.

Everything else is that of the first rank: each rank saves its own copy.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.checkpoint.elements import extent_span
from ckptmove.checkpoint.inventory.build import build_inventory
from ckptmove.checkpoint.layouts.merge import file_record, moved_inventory
from ckptmove.checkpoint.layouts.rank_shards import computed_crc, shard_calls
from ckptmove.checkpoint.open_checkpoint import shifted_progress
from ckptmove.checkpoint.parts import OpenPart
from ckptmove.errors import CrcMismatch
from ckptmove.formats.chunks import flaw_of
from ckptmove.formats.local_shards import CLASSES
from ckptmove.formats.rank_files import RankFiles
from ckptmove.formats.rebuild_calls import rebuild_call
from ckptmove.lazy.chunked import Chunked
from ckptmove.lazy.stored import StoredBytes, stored_tensor
from ckptmove.lazy.tensor import Elements
from ckptmove.model import ArchiveFact, Span
from ckptmove.pickles.state import Machine
from ckptmove.pickles.tree import Persistent, Tuple, nodes
from ckptmove.torch_facts.devices import NO_DEVICE
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.checkpoint.inventory.budget import Budget
    from ckptmove.checkpoint.layouts.rank_shards import RankFile, RankGroup, SavedShard
    from ckptmove.formats.chunks import Chunk
    from ckptmove.io.contracts import Progress
    from ckptmove.lazy.tensor import LazyTensor
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, TensorRecord
    from ckptmove.pickles.tree import Value

#: Beginnings of the keys of storages: of assembled tensors, and of those of the first rank.
_SHARDS, _DATA = "shards/", "data/"
#: Fields of ``('storage', class, key, location, numel)``, torch/serialization.py ``persistent_id``.
_KEY, _LOCATION = 2, 3
_MOST_RECENT: Final = 8


class ShardBox(NamedTuple):
    """A part of a tensor in the file of a rank."""

    file: RankFile
    path: str  # path of the DTensor in the file
    chunk: Chunk  # the part of the whole tensor
    local: TensorRecord  # the same part of the local tensor; the key of its storage is that in the file
    offsets: tuple[int, ...]  # first index of the part along each axis of the local tensor


class RankFilesPart(OpenPart):
    """Files that ranks have saved, each with its shards of the same tensors; ``lead`` is that of the first rank."""

    is_assembled = True

    def __init__(self, group: RankGroup, name: str, limits: Limits) -> None:
        """Hold files that were read; the name is that of the group, or empty if it is the whole checkpoint."""
        lead = group.files[0].part
        self.name, self.base = name, lead.base
        self.path = lead.path.removesuffix(lead.name) + group.name
        self.byteorder, self.pickle_bytes = lead.byteorder, lead.pickle_bytes
        self._limits, self._group, self.lead, self.missing = limits, group, lead, group.missing
        self._paths = tuple(group.files[0].shards)
        self._sound: set[tuple[str, str]] = set()
        #: The shards of the tensors that were read last: a parameter and its moments are read in turn.
        self._recent: dict[str, list[ShardBox] | None] = {}
        self._lock = Lock()
        # The step counts are read before the files are closed.
        facts = group.facts(f"{name}." if name else "")
        # The tree of the first rank is changed; those of the others need not stay in memory.
        for file in group.files:
            if file.part is lead or not file.part.is_remote:
                file.part.drop()
        self.inventory = self._read(facts)
        self.rows = tuple(
            file.part.rows[0]._replace(
                part=name,
                roles=file_record(name, self.inventory).roles,
                tensors=len(self.inventory.tensors),
                devices=tuple(dict.fromkeys(one.device for one in file.part.inventory.tensors if one.storage)),
            )
            for file in group.files
        )
        for file in group.files:
            # These records are freed; one of a DTensor stays, to tell what the file holds.
            inventory = file.part.inventory
            first = next(one for one in inventory.tensors if one.subclass in CLASSES)
            file.part.inventory = replace(inventory, tensors=(first,), optimizers=(), mentions=())

    @property
    def differing(self) -> list[str]:
        """Names of tensors that are no DTensors, and are not the same in the files of other ranks."""
        return [self.full_name(name) for name in self._group.differing]

    @property
    def has_checksums(self) -> bool:
        return all(file.part.has_checksums for file in self._group.files)

    def close(self) -> None:
        for file in self._group.files:
            file.part.close()

    def span(self, key: str) -> Span | None:
        if key.startswith(_DATA):
            return self.lead.span(key.removeprefix(_DATA))
        return None if self._distinct(key) is None else self._extent(key)

    def storage(self, key: str) -> StoredBytes | None:
        if key.startswith(_DATA):
            return self.lead.storage(key.removeprefix(_DATA))
        boxes, saved = self._distinct(key), self._saved(key)
        if boxes is None:
            return None
        chunks = [box.chunk for box in boxes]
        whole = Chunked(saved.shard.shape, saved.local.dtype, chunks, lambda place: _elements(boxes[place]))
        return StoredBytes(Elements(whole), self._extent(key), self.byteorder)

    def is_sharded(self, key: str) -> bool:
        """Whether a storage is that of an assembled tensor, and not one of the first rank."""
        return key.startswith(_SHARDS)

    def boxes_of(self, key: str) -> Iterator[ShardBox]:
        """The shards of an assembled tensor, with those of replicas."""
        path = self._path(key)
        for file in self._group.files:
            local, shard = file.shards[path]
            for chunk, offsets in shard.boxes():
                first = sum(at * step for at, step in zip(offsets, local.stride, strict=True))
                part = local._replace(shape=chunk.sizes, storage_offset=local.storage_offset + first)
                yield ShardBox(file, path, chunk, part, offsets)

    def require_sound(self, key: str) -> None:
        """Compare the storages of a tensor with their CRCs."""
        if key.startswith(_DATA):
            own = {(self.lead.name, key.removeprefix(_DATA)): self.lead}
        else:
            own = {(box.file.part.name, box.local.storage or ""): box.file.part for box in self._distinct(key) or ()}
        for (name, storage), part in own.items():
            if (name, storage) not in self._sound:
                with self._lock:  # they are read from the file once
                    expected = part.crcs.get(storage)
                if expected is not None and computed_crc(part, storage) != expected:
                    raise CrcMismatch(part.path, storage)
                self._sound.add((name, storage))

    def tree(self) -> Value:
        with self.lead.content() as (_, machine):
            return self._whole(machine.root)

    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        found: list[ArchiveFact] = []
        done = 0
        for file in self._group.files:
            own = file.part.inventory
            shifted = None if progress is None else shifted_progress(progress, done, self.inventory.size_bytes)
            found += file.part.check(shifted, jobs)[len(own.facts) :]
            done += own.size_bytes
        return (*self.inventory.facts, *found, *self.replica_facts())

    def replica_facts(self) -> list[ArchiveFact]:
        """Facts about replicas that differ, and whose files do not store CRCs: their bytes are read."""
        known = set(self.inventory.facts)
        prefix = f"{self.name}." if self.name else ""
        return [fact for fact in self._group.with_all_crcs().facts(prefix) if fact not in known]

    def budget(self) -> Budget:
        return self.lead.budget()

    def extras(self) -> Mapping[str, bytes]:
        return self.lead.extras()

    def _read(self, facts: Sequence[ArchiveFact]) -> Inventory:
        """The inventory of the tree, with the names, keys and sites of the whole checkpoint."""
        files = [file.part.inventory for file in self._group.files]
        with self.lead.content() as (container, read):
            machine = Machine(b"", self._limits)
            machine.root, machine.end = self._whole(read.root), read.end - read.begin
            machine.persistents = [node for node in nodes(machine.root) if type(node) is Persistent]
            inventory = build_inventory(RankFiles(container.source, self._limits), machine, self._limits)
        moved = moved_inventory(self.name, inventory, self.base)
        gaps = () if self.missing else self._uncovered()
        return replace(
            moved,
            size_bytes=sum(one.size_bytes for one in files),
            torch_version=files[0].torch_version,
            producer=files[0].producer,
            layout=files[0].layout,
            globals=tuple(dict.fromkeys(use for one in files for use in one.globals)),
            apart=tuple(use for one in files for use in one.apart),
            foreign_opcodes=tuple(dict.fromkeys(code for one in files for code in one.foreign_opcodes)),
            filled_classes=tuple(dict.fromkeys(name for one in files for name in one.filled_classes)),
            facts=(*(fact for one in files for fact in one.facts), *gaps, *facts),
        )

    def _uncovered(self) -> Iterator[ArchiveFact]:
        """Facts about tensors that the shards do not cover, or cover twice."""
        numbers = {path: number for number, path in enumerate(self._paths)}
        for path, elements in self._group.gaps():
            own = f"{_SHARDS}{numbers[path]}"
            key = f"{self.name}/{own}" if self.name else own
            nbytes = max(elements, 0) * ITEM_BYTES[self._group.files[0].shards[path].local.dtype]
            yield ArchiveFact("short-storage", self.full_name(path), nbytes, key)

    def _whole(self, root: Value) -> Value:
        """Make whole tensors of the DTensors in a tree, and give its other storages the keys of this part."""
        numbers = {path: number for number, path in enumerate(self._paths)}
        for path, call in list(shard_calls(root)):
            saved = self._group.files[0].shards[path]
            requires_grad = call.arguments[2].items[7] is True if type(call.arguments[2]) is Tuple else False
            new = rebuild_call(
                f"{_SHARDS}{numbers[path]}", saved.local.dtype, saved.shard.shape, requires_grad=requires_grad
            )
            call.func, call.args, call.state = new.func, new.args, None
        for node in nodes(root):
            pid = node.pid if type(node) is Persistent else None
            if type(node) is Persistent and type(pid) is Tuple and pid.items[:1] == ("storage",):
                fields = [*pid.items]
                key = str(fields[_KEY])
                if not key.startswith(_SHARDS):
                    fields[_KEY], fields[_LOCATION] = _DATA + key, NO_DEVICE
                    node.pid = Tuple(tuple(fields), pid.starts)
        return root

    def _path(self, key: str) -> str:
        return self._paths[int(key.removeprefix(_SHARDS))]

    def _saved(self, key: str) -> SavedShard:
        return self._group.files[0].shards[self._path(key)]

    def _extent(self, key: str) -> Span:
        saved = self._saved(key)
        return Span(0, prod(saved.shard.shape) * ITEM_BYTES[saved.local.dtype])

    def _distinct(self, key: str) -> list[ShardBox] | None:
        """The shards of a tensor without replicas; None if they do not cover it, or some bytes are missing."""
        with self._lock:
            if key not in self._recent:
                if len(self._recent) == _MOST_RECENT:
                    self._recent.pop(next(iter(self._recent)))
                self._recent[key] = self._find_distinct(key)
            return self._recent[key]

    def _find_distinct(self, key: str) -> list[ShardBox] | None:
        found: dict[Chunk, ShardBox] = {}
        for box in self.boxes_of(key):
            if box.chunk.volume:
                found.setdefault(box.chunk, box)
        shape = self._saved(key).shard.shape
        if sum(chunk.volume for chunk in found) != prod(shape) or flaw_of(shape, [*found]):
            return None
        return None if any(span_of(box) is None for box in found.values()) else [*found.values()]


def span_of(box: ShardBox) -> Span | None:
    """Bytes of a shard in its file; None if some are missing."""
    span = None if box.local.storage is None else box.file.part.span(box.local.storage)
    return None if span is None else extent_span(span, box.local)


def _elements(box: ShardBox) -> LazyTensor:
    storage = cast("StoredBytes", box.file.part.storage(box.local.storage or ""))
    return cast("LazyTensor", stored_tensor(storage, box.local))  # `_find_distinct` found its span
