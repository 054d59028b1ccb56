"""A strided view of the bytes of a storage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.io.part import read_into
from ckptmove.lazy.geometry import Axis, contiguous_stride, is_contiguous
from ckptmove.lazy.tensor import TILE, Elements, LazyTensor, swap
from ckptmove.model import Span

if TYPE_CHECKING:
    from ckptmove.io.part import Readable


class StoredBytes(NamedTuple):
    """The bytes of a storage."""

    source: Readable  # source of the bytes
    span: Span  # their position in the source
    byteorder: str  # byte order of the elements, `little` or `big`


class Strided(LazyTensor):
    """A strided view of a storage. All of its elements must be inside the storage."""

    def __init__(
        self, storage: StoredBytes, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
    ) -> None:
        """View the storage from the element ``offset`` on."""
        self.storage, self.dtype, self.shape, self.stride, self.offset = storage, dtype, shape, stride, offset
        self.is_contiguous = is_contiguous(shape, stride)

    @property
    def block_bytes(self) -> int:
        return super().block_bytes if self.is_contiguous else TILE

    def read_into(self, first: int, memory: memoryview) -> None:
        source, span, byteorder = self.storage
        item, start = self.item, span.start + self.offset * self.item
        if self.is_contiguous:
            read_into(source, start + first * item, memory)
        else:
            from ckptmove.lazy.strided import read_strided  # imports numpy

            axes = [Axis(size, step * item) for size, step in zip(self.shape, self.stride, strict=True)]
            read_strided(source, start, axes, item, first, memory)
        if byteorder != sys.byteorder:
            swap(memory, self.dtype)


def as_strided(tensor: LazyTensor) -> Strided:
    """A tensor as a contiguous view of its own elements."""
    storage = StoredBytes(Elements(tensor), Span(0, tensor.nbytes), sys.byteorder)
    return Strided(storage, tensor.dtype, tensor.shape, contiguous_stride(tensor.shape))
