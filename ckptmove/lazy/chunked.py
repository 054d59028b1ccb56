"""A tensor in chunks: boxes of its elements, each a tensor of its own."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptmove.lazy.tensor import TILE, LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    #: Offsets and sizes of a part of a tensor, along each axis.
    Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

#: Bytes to read of each chunk at a time, if chunks lie next to each other in a row.
_RUN: Final = 4 << 10
#: Chunks that are kept after they were loaded: those of a few hundred ranks.
_MOST_LOADED: Final = 1024


class _Rows(NamedTuple):
    """A chunk as rows of the tensor: an axis that it fills completely is merged into the axis before it."""

    shape: tuple[int, ...]  # shape of the tensor
    offsets: tuple[int, ...]  # first index of the chunk on each axis
    sizes: tuple[int, ...]  # shape of the chunk
    place: int  # index of the chunk

    def before(self, index: int) -> int:
        """Number of elements of the chunk that come before an index of the tensor."""
        count, rest, own = 0, prod(self.shape), prod(self.sizes)
        for size, offset, extent in zip(self.shape, self.offsets, self.sizes, strict=True):
            rest, own = rest // size, own // extent
            at, index = index // rest - offset, index % rest
            count += min(max(at, 0), extent) * own
            if not 0 <= at < extent:
                break
        return count

    def position(self, element: int) -> int:
        """Index in the tensor of an element of the chunk, given its index in the chunk."""
        found, by = 0, 1
        for size, offset, extent in zip(
            reversed(self.shape), reversed(self.offsets), reversed(self.sizes), strict=True
        ):
            found += (element % extent + offset) * by
            element //= extent
            by *= size
        return found

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Contiguous runs of the elements ``first`` to ``last`` of the chunk: first, end, and index in the tensor."""
        width = self.sizes[-1]
        while first < last:
            end = min(first - first % width + width, last)
            yield first, end, self.position(first)
            first = end


class Chunked(LazyTensor):
    """A tensor that is covered by disjoint chunks, none of them empty."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str, chunks: Sequence[Box], load: Callable[[int], LazyTensor]
    ) -> None:
        """Hold the boxes of the chunks. ``load`` returns the elements of a chunk by its index, when they are read."""
        self.shape, self.dtype, self.chunks = shape, dtype, chunks
        self.load = lru_cache(_MOST_LOADED)(load)
        rows = [_rows(shape, box, place) for place, box in enumerate(chunks)]
        self._rows = sorted(rows, key=lambda one: one.position(0))
        self._firsts = [one.position(0) for one in self._rows]
        #: Running maximum of the last indices of the chunks, to skip the chunks that end before an index.
        self._lasts = list(accumulate((one.position(prod(one.sizes) - 1) for one in self._rows), max))

    @property
    def block_bytes(self) -> int:
        """As for the first chunk, and more if each read has elements of very many chunks."""
        own = self.load(0).block_bytes if self.chunks else super().block_bytes
        one_by_one = all(map(int.__lt__, self._lasts, self._firsts[1:]))
        return own if one_by_one else max(own, min(_RUN * len(self.chunks), TILE))

    def read_into(self, first: int, memory: memoryview) -> None:
        for start in range(0, len(memory), TILE):
            self._read(first + start // self.item, memory[start : start + TILE])

    def _read(self, low: int, memory: memoryview) -> None:
        item = self.item
        high = low + len(memory) // item
        near = slice(bisect_left(self._lasts, low), bisect_left(self._firsts, high))
        for rows in self._rows[near]:
            first, last = rows.before(low), rows.before(high)
            if first == last:
                continue
            elements, width = self.load(rows.place), rows.sizes[-1]
            if first % width + last - first <= width:  # one run
                place = (rows.position(first) - low) * item
                elements.read_into(first, memory[place : place + (last - first) * item])
                continue
            found = memoryview(bytearray((last - first) * item))
            elements.read_into(first, found)
            for begin, stop, at in rows.runs(first, last):
                place = (at - low) * item
                memory[place : place + (stop - begin) * item] = found[(begin - first) * item : (stop - first) * item]


def joined(tensors: Sequence[LazyTensor], axis: int = 0) -> Chunked:
    """Tensors of one dtype and of the same shape, except along the axis, one after the other as ``torch.cat``."""
    shape = list(tensors[0].shape)
    ends = list(accumulate((one.shape[axis] for one in tensors), initial=0))
    shape[axis] = ends[-1]
    full = [(start, one) for start, one in zip(ends, tensors, strict=False) if one.numel]
    chunks = [(tuple(start if at == axis else 0 for at in range(len(shape))), one.shape) for start, one in full]
    return Chunked(tuple(shape), tensors[0].dtype, chunks, lambda place: full[place][1])


def _rows(shape: tuple[int, ...], box: Box, place: int) -> _Rows:
    whole, offsets, sizes = [1, *shape], [0, *box[0]], [1, *box[1]]
    while len(whole) > 1 and sizes[-1] == whole[-1]:
        size = whole.pop()
        del sizes[-1], offsets[-1]
        for axis in (whole, offsets, sizes):
            axis[-1] *= size
    return _Rows(tuple(whole), tuple(offsets), tuple(sizes), place)
