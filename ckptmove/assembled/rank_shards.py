"""Group files that are shards of one checkpoint: each rank has saved its part of the DTensors or ShardedTensors."""

from __future__ import annotations

import re
import sys
import zlib
from itertools import islice
from math import isnan, prod
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.elements import fills_extent
from ckptmove.checkpoint.inventory.tensor_nodes import named_items
from ckptmove.formats import dtensors, sharded_tensors
from ckptmove.formats.chunks import flaw_of
from ckptmove.formats.local_shards import CLASSES, DTENSOR, shard_call
from ckptmove.model import ArchiveFact
from ckptmove.pickles.rebuild_arguments import NotATensor, contiguous
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import Call, Global, Node
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.formats.local_shards import LocalShard
    from ckptmove.model import FactKind, TensorRecord
    from ckptmove.pickles.tree import Value

#: A number in a name that int() reads: its limit is 4,300 digits.
_NUMBER: Final = re.compile(r"(?<!\d)\d{1,9}(?!\d)")
#: Text before the number of the rank in a name, which other numbers may follow.
_RANK: Final = re.compile(r"rank[_.-]?$", re.IGNORECASE)
#: Tensors of a DTensor: the local one, and the ranks of its mesh. That of a ShardedTensor is its only shard.
_INSIDE: Final = (
    "_local_tensor", "_spec.mesh._rank_map", "_spec.mesh.mesh", "_spec.mesh._root_mesh._rank_map", "0.0.tensor",
)  # fmt: skip
#: Names that tell the number of ranks, as in verl's ``model_world_size_8_rank_0.pt``.
_WORLD_SIZE: Final = re.compile(r"(.*world_size_(\d{1,9})_rank_)(\d{1,9})(?!\d)(.*)")
_BLOCK: Final = 1 << 20
#: Ranks of a checkpoint; a name could have any number.
_MOST_RANKS: Final = 1 << 16
#: Missing files that are named, over all groups: a few names could state any number of them.
_MOST_MISSING: Final = 1 << 12


class SavedShard(NamedTuple):
    """The shard of a DTensor in a file."""

    local: TensorRecord  # the local tensor; the key of its storage is that in the file
    shard: LocalShard  # its place in the whole tensor

    @property
    def like(self) -> object:
        """Properties in which the shards of one tensor agree."""
        return self.local.dtype, self.shard.shape, self.shard.mesh, self.shard.placements


class RankFile(NamedTuple):
    """A file with DTensors."""

    part: FilePart  # the file
    shards: Mapping[str, SavedShard]  # its shards, by the path of the DTensor in the file
    crcs: Mapping[str, int | None]  # CRCs of the storages of its other tensors, by their names in the file
    shard_crcs: Mapping[str, int | None]  # CRCs of storages that a shard fills, by the path of its DTensor

    @property
    def rank(self) -> int:
        """Rank of the process that has saved it."""
        return next(iter(self.shards.values())).shard.rank

    def with_all_crcs(self) -> RankFile:
        """The file with the CRC of each shard that fills its storage."""
        own = ((path, crc, self.shards[path].local.storage or "") for path, crc in self.shard_crcs.items())
        return self._replace(
            shard_crcs={path: computed_crc(self.part, key) if crc is None else crc for path, crc, key in own}
        )


class RankGroup(NamedTuple):
    """Files that are shards of one checkpoint."""

    name: str  # path that the files share, with a `*` in place of the rank
    files: Sequence[RankFile]  # the files by rank
    missing: tuple[str, ...]  # paths of the files of other ranks
    unreadable: frozenset[str] = frozenset()  # those of them that are there, but cannot be read

    @property
    def differing(self) -> list[str]:
        """Names of tensors that are no DTensors, and differ between the ranks by their CRCs."""
        first, *others = (file.crcs for file in self.files)
        return [name for name, crc in first.items() if any(crcs.get(name) != crc for crcs in others)]

    def gaps(self) -> Iterator[tuple[str, int]]:
        """The tensors that the shards do not cover, and the number of missing elements; negative if some are twice."""
        for path, saved in self.files[0].shards.items():
            chunks = {chunk for file in self.files for chunk, _ in file.shards[path].shard.boxes() if chunk.volume}
            missing = prod(saved.shard.shape) - sum(chunk.volume for chunk in chunks)
            if missing or flaw_of(saved.shard.shape, [*chunks]):
                yield path, missing

    def facts(self, prefix: str = "") -> list[ArchiveFact]:
        """Facts about missing files, files of another save, and replicas that differ by their CRCs.

        Other ranks may have replicas of all shards in a missing file.
        """
        kind: FactKind = "missing-replica" if self.missing and next(self.gaps(), None) is None else "missing-rank"
        found: list[tuple[FactKind, str]] = [(kind, path) for path in self.missing if path not in self.unreadable]
        found += (("other-step", path) for path in find_two_saves(self.files))
        differing = differing_replicas(self.files)
        found += (("other-replica", prefix + path) for path in differing)
        found += (("replica-file", path) for path in sorted({path for names in differing.values() for path in names}))
        return [ArchiveFact(kind, name, 0, name) for kind, name in found]

    def with_all_crcs(self) -> RankGroup:
        """The group with the CRCs of all shards: those that the files do not store are computed from their bytes."""
        return self._replace(files=[file.with_all_crcs() for file in self.files])


def shard_calls(root: Value) -> Iterator[tuple[str, Call]]:
    """Path and call of each DTensor and ShardedTensor in the dicts, lists and tuples of a tree; each call once."""
    seen: set[int] = set()
    stack: list[tuple[str, Value]] = [("", root)]
    while stack:
        path, value = stack.pop()
        call = shard_call(value)
        if not isinstance(value, Node) or id(call or value) in seen:
            continue
        seen.add(id(call or value))
        if call is not None:
            yield path, call
        else:
            stack += [(f"{path}.{name}" if path else name, member) for name, member in named_items(value)]


def read_rank_file(part: FilePart) -> RankFile | None:
    """The shards of a file; None if it has none, or if some DTensor cannot be assembled."""
    if not any(use.name in CLASSES for use in part.inventory.globals):
        return None
    listed = {part.own_name(record.name) for record in part.inventory.tensors if record.subclass in CLASSES}
    reader = TensorReader()
    shards: dict[str, SavedShard] = {}
    for path, call in shard_calls(part.tree()):
        try:
            shard, local = _read(call, path, reader)
        except (NotATensor, IndexError, ValueError):
            return None
        # Two paths may be written the same: {"a.b": ...} and {"a": {"b": ...}}.
        if (
            path in shards
            or path not in listed
            or local is None
            or local.shape != shard.local_shape
            or local.kind not in {"tensor", "parameter"}
        ):
            return None
        shards[path] = SavedShard(local, shard)
    is_of_one = len({saved.shard.rank for saved in shards.values()}) == 1
    return RankFile(part, shards, _crcs(part, shards), _shard_crcs(part, shards)) if is_of_one else None


def _read(call: Call, path: str, reader: TensorReader) -> tuple[LocalShard, TensorRecord | None]:
    """The place of a shard, and its local tensor; None if it is not a tensor."""
    kind = call.arguments[1]
    form = dtensors if type(kind) is Global and kind.full_name in DTENSOR else sharded_tensors
    shard, inner = form.read_shard(call), form.local_tensor(call)
    if inner is None:  # a rank without elements has no shard of a ShardedTensor
        whole = reader.tensor(call, path, "other")
        empty = {"shape": shard.local_shape, "stride": contiguous(shard.local_shape), "kind": "tensor"}
        return shard, None if whole is None else whole._replace(**empty)
    return shard, reader.tensor(inner, path, "other") if type(inner) is Call and reader.is_tensor(inner) else None


def _shard_crcs(part: FilePart, shards: Mapping[str, SavedShard]) -> dict[str, int | None]:
    sizes = {part.own_name(storage.key): storage.nbytes for storage in part.inventory.storages}
    with part.content() as (container, _):
        return {
            path: container.storage_crc(saved.local.storage)
            for path, saved in shards.items()
            if saved.local.storage is not None
            and saved.local.storage_offset == 0
            and fills_extent(saved.local)
            and sizes.get(saved.local.storage, 0) <= _padded_nbytes(saved)
        }


def _padded_nbytes(saved: SavedShard) -> int:
    """Bytes of the largest shard of the tensor: FSDP pads the smaller ones with zeros to this size."""
    shape = [*saved.shard.shape]
    for placement, ranks in zip(saved.shard.placements, saved.shard.mesh, strict=True):
        if placement.axis is not None:
            shape[placement.axis] = -(-shape[placement.axis] // ranks)
    return prod(shape) * ITEM_BYTES[saved.local.dtype]


def computed_crc(part: FilePart, storage: str) -> int:
    """CRC-32 of the bytes of a storage in a file, as far as they are there."""
    crc, span = 0, part.span(storage)
    for block in () if span is None else part.source.blocks(span, _BLOCK):
        crc = zlib.crc32(block, crc)
    return crc


def differing_replicas(files: Sequence[RankFile]) -> dict[str, list[str]]:
    """Find the DTensors whose replicas in files of several ranks differ by their CRCs.

    Returns by the path of the DTensor the names of the files whose replica is not that of most files; of all that have
    one if no values are those of most.
    """
    found: dict[str, list[str]] = {}
    for path in files[0].shards:
        for by_crc in _replicas(files, path):
            if len(by_crc) > 1:
                *_, second, _ = sorted(map(len, by_crc.values()))
                others = [file.part.name for own in by_crc.values() if len(own) <= second for file in own]
                found.setdefault(path, []).extend(others)
    return found


def _replicas(files: Iterable[RankFile], path: str) -> Iterable[dict[int, list[RankFile]]]:
    """The files that have the same shard of a DTensor, by its CRC; for each shard."""
    found: dict[object, dict[int, list[RankFile]]] = {}
    for file in files:
        local, shard = file.shards[path]
        crc = file.shard_crcs.get(path)
        if crc is not None and 0 not in local.shape:
            found.setdefault((shard.runs, local.stride), {}).setdefault(crc, []).append(file)
    return found.values()


def _are_stages(files: Sequence[RankFile]) -> bool:
    """Whether files are of stages of a pipeline, which name other tensors the same.

    Stages have no rank in common. The values of every shard differ between stages, and are equal within a stage. In a
    mixed save, only some files or some tensors differ, or the step counts do.
    """
    numbers: dict[frozenset[int], int] = {}
    stages: dict[int, int] = {}  # by rank
    for file in files:
        ranks = frozenset(rank for saved in file.shards.values() for rank in saved.shard.ranks)
        stages[file.rank] = numbers.setdefault(ranks, len(numbers))
    if sum(map(len, numbers)) > len(frozenset().union(*numbers)):
        return False
    is_compared = False
    for path in files[0].shards:
        for by_crc in _replicas(files, path):
            pairs = {(crc, stages[file.rank]) for crc, own in by_crc.items() for file in own}
            if not len(pairs) == len(by_crc) == len({stage for _, stage in pairs}):
                return False
            is_compared = is_compared or len(pairs) > 1
    return is_compared and not find_two_saves(files)


def _crcs(part: FilePart, shards: Mapping[str, SavedShard]) -> dict[str, int | None]:
    inside = {f"{path}.{name}" for path in shards for name in _INSIDE}
    found = {}
    with part.content() as (container, _):
        for record in part.inventory.tensors:
            name, key = part.own_name(record.name), part.own_key(record)
            if key is not None and name not in inside:
                found[name] = container.storage_crc(key)
    return found


def group_by_rank(files: Iterable[RankFile]) -> list[RankGroup]:
    """Group files whose names differ in the rank, and whose DTensors are the same."""
    named: dict[str, dict[int, RankFile]] = {}
    widths: dict[str, set[int]] = {}
    for file in files:
        # The rank is the number after the word, or else the last one of this value.
        name = file.part.name
        places = [match.span() for match in _NUMBER.finditer(name) if int(match[0]) == file.rank]
        if places:
            start, end = max(places, key=lambda place: (_RANK.search(name[: place[0]]) is not None, place))
            name = f"{name[:start]}*{name[end:]}"
            named.setdefault(name, {})[file.rank] = file
            widths.setdefault(name, set()).add(end - start)
    groups: list[RankGroup] = []
    left = _MOST_MISSING
    for name, by_rank in named.items():
        ordered = [by_rank[rank] for rank in sorted(by_rank)]
        if _agree(ordered) and not _are_stages(ordered):
            ranks = {rank for file in ordered for saved in file.shards.values() for rank in saved.shard.ranks}
            ranks.update(_numbered(name) if left > 0 else ())
            width = max(widths[name]) if len(widths[name]) == 1 else 0
            lost = sorted(ranks - by_rank.keys())[: max(left, 1)]  # at least one, so that none looks complete
            left -= len(lost)
            missing = (name.replace("*", f"{rank:0{width}}", 1) for rank in lost)
            groups.append(RankGroup(name, ordered, tuple(missing)))
    return groups


def find_two_saves(files: Iterable[RankFile]) -> tuple[str, ...]:
    """Paths of the files whose step count is not that of most others: files of another save.

    One count of each optimizer is read. A rank that was killed while it replaced its file leaves the earlier one. A
    file without a count, or whose count is unreadable or NaN, is not counted: it may only be damaged.
    """
    counts: dict[tuple[float | None, ...], list[str]] = {}
    for file in files:
        own = tuple(_first_counts(file.part))
        if own and not any(number is None or isnan(number) for number in own):
            counts.setdefault(own, []).append(file.part.name)
    most = max(counts.values(), key=len, default=[])
    return tuple(name for names in counts.values() if names is not most for name in names)


def _first_counts(part: FilePart) -> Iterator[float | None]:
    """The first step count of each optimizer that has one; None if it cannot be read."""
    for optimizer in part.inventory.optimizers:
        record = next(filter(None, (entry.tensor("step") for entry in optimizer.state)), None)
        if record is not None:
            yield part.number(record)


def missing_by_name(names: Iterable[str]) -> list[str]:
    """Names of the files that are missing in sets of names with a world size and a rank: the first of very many."""
    found: dict[tuple[str, str, int], dict[int, str]] = {}
    for name in names:
        match = _WORLD_SIZE.fullmatch(name)
        if match is not None and int(match[2]) <= _MOST_RANKS:
            found.setdefault((match[1], match[4], int(match[2])), {})[int(match[3])] = match[3]
    lost: list[str] = []
    for (before, after, size), texts in found.items():
        width = max((len(text) for text in texts.values() if text.startswith("0")), default=0)
        missing = (f"{before}{rank:0{width}}{after}" for rank in range(size) if rank not in texts)
        lost += islice(missing, _MOST_MISSING - len(lost))
    return lost


def _numbered(name: str) -> range:
    """The ranks that a name tells, which has a ``*`` in place of the rank."""
    match = _WORLD_SIZE.fullmatch(name.replace("*", "0", 1))
    return range(int(match[2]) if match is not None and int(match[2]) <= _MOST_RANKS else 0)


def _agree(files: Sequence[RankFile]) -> bool:
    """Whether the files have shards of the same tensors, in the byte order in which tensors are assembled."""
    like = [{path: saved.like for path, saved in file.shards.items()} for file in files]
    return all(own == like[0] for own in like) and all(file.part.byteorder == sys.byteorder for file in files)
