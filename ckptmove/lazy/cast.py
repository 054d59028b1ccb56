"""A tensor in another floating dtype."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptmove.io.cast import cast_blocks
from ckptmove.lazy.tensor import TILE, LazyTensor

if TYPE_CHECKING:
    from collections.abc import Callable


class Cast(LazyTensor):
    """The elements of a tensor, cast as :func:`ckptmove.io.cast.cast_blocks` does."""

    def __init__(self, tensor: LazyTensor, dtype: str, overflowed: Callable[[int], None] | None = None) -> None:
        """Cast a tensor between two of ``CASTABLE_FLOATS``, or two of ``COMPLEX_PARTS``.

        ``overflowed`` is called for each read part with values that overflow, with the number of finite values that
        were too large; a complex number counts as two values.
        """
        self.tensor, self.dtype, self.shape, self.overflowed = tensor, dtype, tensor.shape, overflowed

    @property
    def block_bytes(self) -> int:
        return self.tensor.block_bytes // self.tensor.item * self.item

    def read_into(self, first: int, memory: memoryview) -> None:
        wide = self.tensor.item
        nbytes = len(memory) // self.item * wide
        buffer = memoryview(bytearray(min(nbytes, TILE)))
        done = 0
        for start in range(0, nbytes, TILE):
            part = buffer[: nbytes - start]
            self.tensor.read_into(first + start // wide, part)
            for data in cast_blocks((part,), self.tensor.dtype, self.dtype, sys.byteorder, self.overflowed):
                memory[done : done + len(data)] = data
                done += len(data)
