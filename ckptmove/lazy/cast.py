"""A tensor in another floating dtype."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from ckptmove.lazy.tensor import TILE, LazyTensor
from ckptmove.torch_facts.dtypes import COMPLEX_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes of source elements to cast at a time; a multiple of every element size. The C library returns larger
#: arrays to the system after each use, and new pages cost more than the cast.
CAST_BLOCK: Final = 1 << 16


class Cast(LazyTensor):
    """The elements of a tensor, cast to another dtype as torch's ``Tensor.to`` does.

    Values are rounded to nearest, ties to even. Values that are too large become infinite; float8_e4m3fn has no
    infinity, and they become its largest number, as in torch 2.13.
    """

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
        from ckptmove.io.floats import cast  # imports numpy

        source, target = (COMPLEX_PARTS.get(dtype, dtype) for dtype in (self.tensor.dtype, self.dtype))
        order = "<" if sys.byteorder == "little" else ">"
        item, wide = self.item, self.tensor.item
        nbytes = len(memory) // item * wide
        buffer = memoryview(bytearray(min(nbytes, TILE)))
        done = 0
        for start in range(0, nbytes, TILE):
            part = buffer[: nbytes - start]
            self.tensor.read_into(first + start // wide, part)
            for at in range(0, len(part), CAST_BLOCK):
                data, too_large = cast(part[at : at + CAST_BLOCK], source, target, order)
                if too_large and self.overflowed is not None:
                    self.overflowed(too_large)
                memory[done : done + len(data)] = data
                done += len(data)
