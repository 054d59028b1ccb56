"""Read a tensor that is stored in pieces as if its elements were contiguous.

A piece whose elements are not in order is read into memory completely.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.elements import blocks, is_contiguous, raw_blocks
from ckptmove.io.part import read_into
from ckptmove.model import Span
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.formats.chunks import Chunk
    from ckptmove.lazy.stored import StoredBytes
    from ckptmove.model import TensorRecord


class ChunkElements:
    """The elements of one chunk, in the order in which torch counts them and in this machine's byte order."""

    def __init__(self, stored: StoredBytes, record: TensorRecord, span: Span) -> None:
        self._stored, self._record, self._start = stored, record, span.start
        self._item = ITEM_BYTES[record.dtype]
        self._held = None if is_contiguous(record) else b"".join(blocks(stored, record, span))

    def read_into(self, first: int, memory: memoryview) -> None:
        """Read elements from ``first`` on until the memory is full; errors as of the source."""
        low, high = first * self._item, first * self._item + len(memory)
        if self._held is not None:
            memory[:] = self._held[low:high]
        elif self._stored.byteorder == sys.byteorder:
            read_into(self._stored.source, self._start + low, memory)
        else:
            span = Span(self._start + low, self._start + high)
            memory[:] = b"".join(raw_blocks(self._stored, self._record, span))


class _Box(NamedTuple):
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


class AssembledTensor:
    """Bytes of a contiguous tensor, assembled from its chunks as they are read."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str, chunks: Sequence[Chunk], load: Callable[[int], ChunkElements]
    ) -> None:
        """Hold the chunks, which are disjoint, not empty, and cover the tensor.

        ``load`` returns the elements of a chunk by its index, when they are read.
        """
        self._item = ITEM_BYTES[dtype]
        self._load = load
        self._loaded: dict[int, ChunkElements] = {}
        boxes = [_box(shape, chunk, place) for place, chunk in enumerate(chunks)]
        self._boxes = sorted(boxes, key=lambda box: box.position(0))
        self._firsts = [box.position(0) for box in self._boxes]
        #: Running maximum of the last indices of the boxes, to skip the boxes that end before an index.
        self._lasts = list(accumulate((box.position(prod(box.sizes) - 1) for box in self._boxes), max))

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive), both between two elements."""
        data = bytearray(end - start)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Read bytes from ``start`` on until the memory is full; limits and errors as of :meth:`read`."""
        item = self._item
        low, high = start // item, (start + len(memory)) // item
        near = slice(bisect_left(self._lasts, low), bisect_left(self._firsts, high))
        for box in self._boxes[near]:
            first, last = box.before(low), box.before(high)
            if first == last:
                continue
            if box.place not in self._loaded:
                self._loaded[box.place] = self._load(box.place)
            elements, width = self._loaded[box.place], box.sizes[-1]
            if first % width + last - first <= width:  # one run
                place = (box.position(first) - low) * item
                elements.read_into(first, memory[place : place + (last - first) * item])
                continue
            found = memoryview(bytearray((last - first) * item))
            elements.read_into(first, found)
            for begin, stop, at in box.runs(first, last):
                place = (at - low) * item
                memory[place : place + (stop - begin) * item] = found[(begin - first) * item : (stop - first) * item]


def _box(shape: tuple[int, ...], chunk: Chunk, place: int) -> _Box:
    whole, offsets, sizes = [1, *shape], [0, *chunk.offsets], [1, *chunk.sizes]
    while len(whole) > 1 and sizes[-1] == whole[-1]:
        size = whole.pop()
        del sizes[-1], offsets[-1]
        for axis in (whole, offsets, sizes):
            axis[-1] *= size
    return _Box(tuple(whole), tuple(offsets), tuple(sizes), place)
