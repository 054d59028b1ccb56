"""Read the values of a checkpoint by their names in the state of a case, without ``torch.distributed.checkpoint``."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from ckptmove.errors import UsageError
from ckptmove.proof.loading.objects import NotAllowed, build
from ckptmove.proof.loading.storages import Storages
from ckptmove.proof.tensors.pieces import Window
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.training.mesh.launch import ranks_of
from ckptmove.training.mesh.numbered import Named, ends_of, named

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from typing_extensions import Self

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.formats.chunks import Chunk
    from ckptmove.formats.dcp.metadata import DistributedMetadata
    from ckptmove.model import OptimizerRecord, TensorRecord

#: Roles of tensors whose file has to be restored: another file may be restored by other code of the script.
_TRAINED: Final = frozenset({"model", "optimizer", "ema"})


class Region(NamedTuple):
    """A box of a tensor's elements."""

    offsets: tuple[int, ...]  # first index on each axis
    sizes: tuple[int, ...]  # length on each axis

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This region of a tensor, as a view."""
        for axis, (start, length) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(axis, min(start, whole.shape[axis]), length)
        return whole


class Slice(NamedTuple):
    """Elements of a flattened tensor, one after the other."""

    first: int  # index of the first one
    numel: int  # number of elements
    shape: tuple[int, ...]  # shape of the whole tensor

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor."""
        return whole.reshape(-1)[self.first : self.first + self.numel]


class StoredState:
    """The values of a checkpoint, by their names in the state of a case.

    The state of a distributed checkpoint has its names. Other files may be the value of a key of the state, as
    ``{"model": ...}`` for a directory of safetensors files: their names get the prefix that fits the state.

    Attributes:
        distributed: folders that ``torch.distributed.checkpoint`` can load, with their ``.metadata``.
        tensors: the tensors, each with its part.
        objects: values of the other parts that are not tensors.
        names: names of all values, also those of objects in distributed parts.
        in_files: names of the values in other parts.
        optimizers: the optimizers, each with its path in the state.
        aside: names of the files without a value of the state, a model or an optimizer.
        tied: names of parameters that are only stored under another name of the same parameter.
    """

    def __init__(
        self, checkpoint: OpenCheckpoint, asked: Collection[str], tied: Iterable[Collection[str]] = ()
    ) -> None:
        """Match the parts of a checkpoint with a state.

        Args:
            asked: names in the state of any rank, joined by dots.
            tied: names of the same parameter; a file may have one of them, as those of Hugging Face do.
        """
        self._read = StoredTensors(checkpoint.parts)
        self.distributed: list[tuple[str, DistributedMetadata]] = []
        self.tensors: dict[str, tuple[OpenPart, TensorRecord]] = {}
        self.objects: dict[str, Any] = {}
        self.names: set[str] = set()
        self.in_files: set[str] = set()
        self.aside: list[str] = []
        self._restored: list[OpenPart] = []
        self.optimizers: list[tuple[str, OptimizerRecord]] = []
        for part in checkpoint.parts:
            if part.metadata is not None:
                self.distributed.append((part.path, part.metadata))
                names = dict.fromkeys(entry.name for entry in part.metadata.entries)
                self._add(part, "", names, Named([*part.inventory.optimizers], {}, {}))
            else:
                self._match(part, asked)
        self.tied = [*self._tie(tied)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._read.__exit__()

    def _match(self, part: OpenPart, asked: Collection[str]) -> None:
        own = named(part, asked)
        values = {own.names.get(name, name): own.params.get(name, value) for name, value in _values(part).items()}
        fitting = Counter(name[: len(name) - len(end)] for name in asked for end in ends_of(name) if end in values)
        best = max(fitting.values(), default=0)
        prefixes = sorted(prefix for prefix, count in fitting.items() if count == best and 2 * best > len(values))
        if len(prefixes) > 1:
            raise UsageError(f"{part.path} fits several parts of state: {', '.join(one or 'all' for one in prefixes)}")
        if not prefixes and not any(record.role in _TRAINED for record in part.inventory.tensors):
            self.aside.append(part.name)
            return
        self._add(part, next(iter(prefixes), ""), values, own)

    def _add(self, part: OpenPart, prefix: str, values: dict[str, Any], own: Named) -> None:
        placed = {prefix + name: value for name, value in values.items()}
        both = self.names & placed.keys()
        if both:
            raise UsageError(f"{part.path} and another file have {min(both)!r}: name one of them, or its folder")
        self.names |= placed.keys()
        tensors = {part.own_name(one.name): (part, one) for one in part.inventory.tensors}
        own_tensors = {prefix + own.names.get(name, name): one for name, one in tensors.items()}
        self.tensors |= {name: one for name, one in own_tensors.items() if name in placed}
        if part.metadata is None:
            self.in_files |= placed.keys()
            self.objects |= {name: value for name, value in placed.items() if not isinstance(value, torch.Tensor)}
        self._restored.append(part)
        self.optimizers += (((prefix + part.own_name(one.where)).rstrip("."), one) for one in own.optimizers)

    def _tie(self, tied: Iterable[Collection[str]]) -> Iterator[str]:
        """Give each parameter of several names all of them."""
        for names in tied:
            there = sorted(self.tensors.keys() & names)
            for name in sorted({*names} - self.names) if there else ():
                self.tensors[name] = self.tensors[there[0]]
                self.names.add(name)
                self.in_files.add(name)
                yield name

    @property
    def has_moments(self) -> bool:
        """Whether it has state of an optimizer other than counters."""
        return any(record.role == "optimizer" and record.shape for _, record in self.tensors.values())

    @property
    def saved_by(self) -> int | None:
        """Number of ranks that saved the checkpoint; None if unknown."""
        found = [ranks_of(metadata.pieces.files) for _, metadata in self.distributed]
        found += (len(part.rows) + len(part.missing) for part in self._restored if part.members)
        return max((count for count in found if count is not None), default=None)

    def chunks(self, name: str) -> frozenset[Chunk]:
        """The shards of a tensor in the files; empty if it is stored as a whole."""
        part, record = self.tensors[name]
        key = part.own_key(record)
        return frozenset() if key is None else frozenset(part.chunks(key))

    def region(self, name: str, where: Region | Slice | None = None) -> torch.Tensor:
        """Some elements of a tensor on the CPU; by default all of it."""
        _, record = self.tensors[name]
        if isinstance(where, Slice):
            window = Window(where.first, where.first + where.numel, flat=True)
            return self._read.tensor(record, window).clone()
        offsets, sizes = where or Region((0,) * len(record.shape), record.shape)
        first = sum(offset * stride for offset, stride in zip(offsets, record.stride, strict=True))
        own = record._replace(shape=sizes, storage_offset=record.storage_offset + first * (0 not in sizes))
        return self._read.tensor(own).clone(memory_format=torch.contiguous_format)


def _values(part: OpenPart) -> dict[str, Any]:
    """The values of a file by their names joined by dots; tensors are on the meta device."""
    homes = {part.own_name(one.key): (part, one) for one in part.inventory.storages}
    with Storages(homes, {}, is_meta=True) as storages:
        try:
            root = build(part.tree(), storages.storage, sys.maxsize)  # the inventory has checked its depth
        except NotAllowed as error:
            raise UsageError(f"{part.path} has {error}, which weights_only=True refuses") from None
    return flatten_state_dict(root)[0] if isinstance(root, dict) else {}


def is_sharded(value: object) -> bool:
    """Whether a value is a tensor that has only its elements of this rank."""
    return isinstance(value, DTensor | ShardedTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor that is no ShardedTensor."""
    detached: Any = tensor.detach()
    found: torch.Tensor = detached.to_local() if isinstance(tensor, DTensor) else detached
    return found


def region_of(tensor: torch.Tensor) -> Region:
    """The region that this rank has of a tensor; all of it if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.dim(), tuple(tensor.shape))
    # The protocol by which torch.distributed.checkpoint saves: one chunk for a DTensor.
    chunk = tensor.__create_chunk_list__()[0]
    return Region(tuple(chunk.offsets), tuple(chunk.sizes))


def shards_of(tensor: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
    """This rank's shards of a tensor, each with its region."""
    if not isinstance(tensor, ShardedTensor):
        return [(region_of(tensor), local(tensor))]
    return [
        (Region(tuple(one.metadata.shard_offsets), tuple(one.metadata.shard_sizes)), one.tensor.detach())
        for one in tensor.local_shards()
    ]
