"""Read regions of the tensors of a distributed checkpoint without ``torch.distributed.checkpoint``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckptmove.checkpoint.layouts.distributed_part import DistributedPart
from ckptmove.errors import DamagedArchive, UsageError
from ckptmove.verification.state import dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint


class Region(NamedTuple):
    """A box of a tensor's elements.

    Attributes:
        offsets: first index on each axis.
        sizes: length on each axis.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This region of a tensor, as a view."""
        for axis, (start, length) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(axis, min(start, whole.shape[axis]), length)
        return whole


def distributed_part(checkpoint: OpenCheckpoint) -> DistributedPart:
    """The ``.metadata`` of a directory, with the files next to it.

    Raises:
        UsageError: if the checkpoint is anything else, or the folder of ``.metadata`` is below it.
    """
    found = [part for part in checkpoint.parts if isinstance(part, DistributedPart)]
    if not found:
        raise UsageError(
            f"{checkpoint.path} is no directory of torch.distributed.checkpoint: a sharded case restores only these"
        )
    if found[0].name:
        raise UsageError(f"a sharded case restores one .metadata: name its folder, {found[0].path}")
    return found[0]


class StoredRegions:
    """The tensors of a distributed checkpoint, read in regions."""

    def __init__(self, part: DistributedPart) -> None:
        """Hold the part that contains them."""
        self._part = part
        self.tensors = {tensor.name: tensor for tensor in part.metadata.tensors}

    def region(self, name: str, region: Region | None = None) -> torch.Tensor:
        """A region of a tensor on the CPU; by default all of it.

        Raises:
            DamagedArchive: if its bytes are incomplete.
            UnreadableInput: if a piece is damaged.
        """
        tensor = self.tensors[name]
        offsets, sizes = region or Region((0,) * len(tensor.shape), tensor.shape)
        if not prod(sizes):
            return torch.empty(sizes, dtype=dtype_of(tensor.dtype))
        stored = self._part.storage(name)
        if stored is None:
            raise DamagedArchive(self._part.path, f"'{name}' is incomplete")
        strides = _strides(tensor.shape)
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        item = dtype_of(tensor.dtype).itemsize
        values = bytearray(stored.source.read(first * item, (last + 1) * item))
        flat = torch.frombuffer(values, dtype=dtype_of(tensor.dtype))
        return flat.as_strided(sizes, strides).clone()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor."""
    detached: Any = tensor.detach()
    found: torch.Tensor = detached.to_local() if isinstance(tensor, DTensor) else detached
    return found


def region_of(tensor: torch.Tensor) -> Region:
    """The region that this rank has of a tensor; all of it if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return Region((0,) * tensor.dim(), tuple(tensor.shape))
    # The protocol by which torch.distributed.checkpoint saves: one chunk for a DTensor.
    chunk = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]  # torch has no annotation
    return Region(tuple(chunk.offsets), tuple(chunk.sizes))
