"""The chunks that a distributed tensor is saved in: boxes that lie side by side.

Never compares each with each: a sharded tensor may have thousands.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Far more than a grid of shards asks for.
_MOST_COMPARISONS: Final = 2_000_000


class Chunk(NamedTuple):
    """A part of a tensor.

    Attributes:
        offsets: where it begins in the tensor, in elements along each axis.
        sizes: its shape.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of its elements."""
        return prod(self.sizes)

    def end(self, axis: int) -> int:
        """Where it ends along an axis (exclusive)."""
        return self.offsets[axis] + self.sizes[axis]

    def meets(self, other: Chunk) -> bool:
        """Whether both have an element in common; neither is empty."""
        return all(
            self.offsets[axis] < other.end(axis) and other.offsets[axis] < self.end(axis)
            for axis in range(len(self.offsets))
        )


def flaw_of(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> str:
    """What keeps chunks from being parts of one tensor, up to its name; empty where nothing does.

    Every rank may have saved a tensor without axes: as torch does, none of them is looked at.

    Raises:
        LimitExceeded: they lie so that the question takes too long.
    """
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return "a chunk does not have the axes of"
        if any(chunk.end(axis) > size for axis, size in enumerate(shape)):
            return "a chunk reaches out of"
    solid = [chunk for chunk in chunks if chunk.volume]
    return "chunks overlap in" if shape and len(solid) > 1 and _overlap(solid) else ""


def _overlap(chunks: list[Chunk]) -> bool:
    """Sweep along the axis that parts them best, as torch's ``_validate_global_plan`` does along the longest."""
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
