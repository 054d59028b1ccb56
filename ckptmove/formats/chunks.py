"""Chunks of a distributed tensor: boxes that must not overlap.

Overlaps are found by a sweep, not by comparing all pairs: a sharded tensor may have thousands of chunks.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Far more than a grid of shards needs.
_MOST_COMPARISONS: Final = 2_000_000


class Chunk(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]  # start of the part in the tensor, in elements along each axis
    sizes: tuple[int, ...]  # its shape

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def end(self, axis: int) -> int:
        """End of the part along an axis (exclusive)."""
        return self.offsets[axis] + self.sizes[axis]

    def meets(self, other: Chunk) -> bool:
        """Whether two non-empty chunks have an element in common."""
        return all(
            self.offsets[axis] < other.end(axis) and other.offsets[axis] < self.end(axis)
            for axis in range(len(self.offsets))
        )


def flaw_of(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str:
    """Why chunks cannot be parts of one tensor, to be followed by its name; empty if they can.

    Every rank may save a tensor without axes, so chunks without axes may overlap, as in torch.
    """
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return "a chunk has another number of axes than"
        if any(chunk.end(axis) > size for axis, size in enumerate(shape)):
            return "a chunk reaches past the end of"
    nonempty = [chunk for chunk in chunks if chunk.volume]
    return "chunks overlap in" if shape and len(nonempty) > 1 and _overlap(nonempty) else ""


def _overlap(chunks: list[Chunk]) -> bool:
    """Sweep along the axis with the most distinct offsets; torch's ``_validate_global_plan`` takes the longest axis."""
    axes = range(len(chunks[0].offsets))
    axis = max(axes, key=lambda axis: len({chunk.offsets[axis] for chunk in chunks}))
    open_ones: list[Chunk] = []
    comparisons = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        start = chunk.offsets[axis]
        open_ones = [other for other in open_ones if other.end(axis) > start]
        comparisons += len(open_ones) + 1
        if comparisons > _MOST_COMPARISONS:
            raise LimitExceeded("comparisons of chunks", limit=_MOST_COMPARISONS, actual=comparisons, is_fixed=True)
        if any(chunk.meets(other) for other in open_ones):
            return True
        open_ones.append(chunk)
    return False
