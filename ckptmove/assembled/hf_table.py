"""The table of tensors in shards of one folder: the chunks of each tensor must cover it."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.errors import DamagedArchive, MissingShard
from ckptmove.formats.chunks import flaw_of
from ckptmove.formats.safetensors_shards import ShardName, shard_name
from ckptmove.model import ArchiveFact
from ckptmove.pickles.rebuild_arguments import NotATensor, bytes_of
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptmove.assembled.table import Placed
    from ckptmove.model import TensorRecord

_SHOWN: Final = 80
_LOST: Final = "a shard is missing"


class ShardedTensor(NamedTuple):
    """A tensor in chunks."""

    dtype: str  # torch's name
    shape: tuple[int, ...]  # shape of the whole tensor
    pieces: tuple[Placed, ...]  # its chunks, which do not overlap; those without elements are left out

    @property
    def nbytes(self) -> int:
        """Length in bytes of its elements."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def uncovered(self) -> int:
        """Number of elements in no chunk."""
        return prod(self.shape) - sum(piece.chunk.volume for piece in self.pieces)

    def is_cut(self, parts: int) -> bool:
        """Whether it would have more chunks if ``torch.chunk`` had split it into as many parts along its first axis."""
        if not self.shape or len(self.pieces) >= parts:
            return False
        return any(piece.chunk.sizes[0] > -(-self.shape[0] // parts) for piece in self.pieces)


def sharded_tensor(name: str, pieces: Sequence[Placed], path: str) -> ShardedTensor:
    """The tensor with these chunks."""
    dtype, *others = {cast("TensorRecord", piece.local).dtype for piece in pieces}
    axes = len(pieces[0].chunk.sizes)
    if others or any(len(piece.chunk.sizes) != axes for piece in pieces):
        raise DamagedArchive(path, f"the shards have different dtypes or numbers of axes for tensor {name[:_SHOWN]!r}")
    shape = tuple(max(piece.chunk.end(axis) for piece in pieces) for axis in range(axes))
    try:
        bytes_of(shape, dtype)
    except NotATensor as error:
        raise DamagedArchive(path, f"the offsets of tensor {name[:_SHOWN]!r} are too large") from error
    # Each rank may save a tensor without axes.
    own = tuple({piece.chunk.offsets: piece for piece in pieces if piece.chunk.volume}.values())
    flaw = flaw_of(shape, [piece.chunk for piece in own])
    if flaw:
        raise DamagedArchive(path, f"{flaw} tensor {name[:_SHOWN]!r}")
    return ShardedTensor(dtype, shape, own)


def absent_shards(tensors: Mapping[str, ShardedTensor], files: Iterable[str], path: str) -> Iterator[ArchiveFact]:
    """The shards that may be missing at the end of tensors; an error if one is missing of all ranks, or in the middle.

    A rank without a chunk of the tensors of a file does not write the file. Chunks show no gap at the end of a tensor,
    where one may be missing if those of most tensors are larger than ``torch.chunk`` makes them. But so are tensors
    that one rank saves whole, since all ranks have them.
    """
    names = {file: cast("ShardName", shard_name(file)) for file in files}
    ranks: dict[tuple[int, int], set[int]] = {}
    held: dict[tuple[int, int], list[ShardedTensor]] = {}
    for name in names.values():
        ranks.setdefault(name[1:], set()).add(name.rank)
    for tensor in tensors.values():
        for place in {names[piece.file][1:] for piece in tensor.pieces}:
            held.setdefault(place, []).append(tensor)
    _require_numbers(ranks, path)
    last = max(name.rank for name in names.values())
    parts = max((len(tensor.pieces) for tensor in tensors.values()), default=0)
    for (number, count), own in held.items():
        there = ranks[number, count]
        absent = next((rank for rank in range(1, last + 1) if rank not in there), None)
        if absent is not None:
            file = ShardName(absent, number, count).text
            if any(tensor.uncovered for tensor in own):
                raise MissingShard(f"{path}/", file, last - len(there) - 1, _LOST)
            if _is_short(own, parts):
                yield ArchiveFact("absent-shard", file, 0)
    for key, tensor in tensors.items():
        if tensor.uncovered:
            raise DamagedArchive(path, f"no shard has some elements of tensor {key[:_SHOWN]!r}")


def _require_numbers(ranks: Mapping[tuple[int, int], set[int]], path: str) -> None:
    """Raise an error if no rank has the file of a number."""
    for count in {count for _, count in ranks}:
        lost = count - sum(other == count for _, other in ranks)
        if lost > 0:
            first = next(number for number in range(1, count + 1) if (number, count) not in ranks)
            raise MissingShard(f"{path}/", ShardName(1, first, count).text, lost - 1, _LOST)


def _is_short(tensors: Sequence[ShardedTensor], parts: int) -> bool:
    """Whether a chunk may be missing at the end of tensors with most of the bytes."""
    cut = sum(tensor.nbytes for tensor in tensors if tensor.is_cut(parts))
    return 2 * cut > sum(tensor.nbytes for tensor in tensors)
