"""Files of several ranks as one part of a checkpoint: DTensors and ShardedTensors are assembled from their shards.

Everything else is that of the first rank: each rank saves its own copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptmove.assembled.part import AssembledPart
from ckptmove.assembled.rank_shards import computed_crc, shard_calls
from ckptmove.assembled.table import Placed, TableEntry
from ckptmove.checkpoint.inventory.build import machine_inventory
from ckptmove.checkpoint.merge import file_record, moved_inventory
from ckptmove.checkpoint.open_checkpoint import shifted_progress
from ckptmove.errors import CrcMismatch
from ckptmove.formats.chunks import Chunk
from ckptmove.formats.local_shards import CLASSES
from ckptmove.formats.rebuild_calls import rebuild_call
from ckptmove.model import ArchiveFact
from ckptmove.pickles.state import Machine
from ckptmove.pickles.storage_id import KEY, storage_ids, with_key, with_location
from ckptmove.pickles.tree import Persistent, Tuple, nodes
from ckptmove.torch_facts.devices import NO_DEVICE
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.assembled.rank_shards import RankGroup
    from ckptmove.checkpoint.inventory.budget import Budget
    from ckptmove.io.contracts import Progress
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory
    from ckptmove.pickles.tree import Value

#: Beginnings of the keys of storages: of assembled tensors, and of those of the first rank.
_SHARDS, _DATA = "shards/", "data/"
_FORMAT: Final = "rank-files"


class RankFilesPart(AssembledPart):
    """Files that ranks have saved, each with its shards of the same tensors."""

    def __init__(self, group: RankGroup, name: str, limits: Limits) -> None:
        """Hold files that were read; the name is that of the group, or empty if it is the whole checkpoint."""
        super().__init__()
        lead = group.files[0].part
        self.name, self.base = name, lead.base
        self.path = lead.path.removesuffix(lead.name) + group.name
        self.pickle_bytes = lead.pickle_bytes
        self._limits, self._group, self._lead, self.missing = limits, group, lead, group.missing
        self.members = {file.part.name: file.part for file in group.files}
        self._paths = tuple(group.files[0].shards)
        # The step counts are read before the files are closed.
        facts = group.facts(f"{name}." if name else "")
        # The tree of the first rank is changed; those of the others need not stay in memory.
        for part in self.members.values():
            if part is lead or not part.is_remote:
                part.drop()
        self.inventory = self._read(facts)
        self.rows = tuple(
            part.rows[0]._replace(
                part=name,
                roles=file_record(name, self.inventory).roles,
                tensors=len(self.inventory.tensors),
                devices=tuple(dict.fromkeys(one.device for one in part.inventory.tensors if one.storage)),
            )
            for part in self.members.values()
        )
        for part in self.members.values():
            # These records are freed; one of a DTensor stays, to tell what the file holds.
            first = next(one for one in part.inventory.tensors if one.subclass in CLASSES)
            part.inventory = replace(part.inventory, tensors=(first,), optimizers=(), mentions=())

    @property
    def differing(self) -> list[str]:
        return [self.full_name(name) for name in self._group.differing]

    @property
    def has_checksums(self) -> bool:
        return all(part.has_checksums for part in self.members.values())

    def close(self) -> None:
        for part in self.members.values():
            part.close()

    def entry(self, key: str) -> TableEntry:
        if key.startswith(_DATA):
            own = Placed(Chunk((), ()), self._lead.name, key=key.removeprefix(_DATA))
            return TableEntry("", (), (own,), is_storage=True)
        path = self._paths[int(key.removeprefix(_SHARDS))]
        saved = self._group.files[0].shards[path]
        return TableEntry(saved.local.dtype, saved.shard.shape, self._placed(path))

    def check_chunk(self, key: str, placed: Placed) -> None:
        del key
        part, own = self.members[placed.file], (placed.file, placed.key)
        if own in self._sound:
            return
        with self._lock:  # they are read from the file once
            expected = part.crcs.get(placed.key)
        if expected is not None and computed_crc(part, placed.key) != expected:
            raise CrcMismatch(part.path, placed.key)
        self._sound.add(own)

    def tree(self) -> Value:
        with self._lead.content() as (_, machine):
            return self._assembled_tree(machine.root)

    def check(self, progress: Progress | None = None, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        found: list[ArchiveFact] = []
        done = 0
        for part in self.members.values():
            own = part.inventory
            shifted = None if progress is None else shifted_progress(progress, done, self.inventory.size_bytes)
            found += part.check(shifted, jobs)[len(own.facts) :]
            done += own.size_bytes
        return (*self.inventory.facts, *found, *self.replica_facts())

    def replica_facts(self) -> list[ArchiveFact]:
        """Facts about replicas that differ, and whose files do not store CRCs: their bytes are read."""
        known = set(self.inventory.facts)
        prefix = f"{self.name}." if self.name else ""
        return [fact for fact in self._group.with_all_crcs().facts(prefix) if fact not in known]

    def budget(self) -> Budget:
        return self._lead.budget()

    def extras(self) -> Mapping[str, bytes]:
        return self._lead.extras()

    def _placed(self, path: str) -> Iterator[Placed]:
        """The shards of a tensor, with those of replicas."""
        for file in self._group.files:
            local, shard = file.shards[path]
            for chunk, offsets in shard.boxes():
                first = sum(at * step for at, step in zip(offsets, local.stride, strict=True))
                own = local._replace(shape=chunk.sizes, storage_offset=local.storage_offset + first)
                name = f"{path}._local_tensor"
                yield Placed(chunk, file.part.name, None, local.storage or "", own, name, offsets)

    def _read(self, facts: Sequence[ArchiveFact]) -> Inventory:
        """The inventory of the tree, with the names, keys and sites of the whole checkpoint."""
        files = [part.inventory for part in self.members.values()]
        with self._lead.content() as (_, read):
            machine = Machine(b"", self._limits)
            machine.root, machine.end = self._assembled_tree(read.root), read.end - read.begin
            machine.persistents = [node for node in nodes(machine.root) if type(node) is Persistent]
            inventory = replace(machine_inventory(machine, _FORMAT, self._limits), path=self._lead.path)
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

    def _assembled_tree(self, root: Value) -> Value:
        """Make whole tensors of the DTensors in a tree, and give its other storages the keys of this part."""
        numbers = {path: number for number, path in enumerate(self._paths)}
        for path, call in list(shard_calls(root)):
            saved = self._group.files[0].shards[path]
            requires_grad = call.arguments[2].items[7] is True if type(call.arguments[2]) is Tuple else False
            new = rebuild_call(
                f"{_SHARDS}{numbers[path]}", saved.local.dtype, saved.shard.shape, requires_grad=requires_grad
            )
            call.func, call.args, call.state = new.func, new.args, None
        for node, pid in storage_ids(nodes(root)):
            key = str(pid.items[KEY])
            if not key.startswith(_SHARDS):
                node.pid = with_location(with_key(pid, _DATA + key), NO_DEVICE)
        return root
