"""A strided view of the bytes of a storage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.io.part import read_into
from ckptmove.lazy.geometry import Axis, contiguous_stride, extent_numel, is_contiguous
from ckptmove.lazy.tensor import TILE, Elements, LazyTensor, swap
from ckptmove.model import Span

if TYPE_CHECKING:
    from ckptmove.io.part import Readable
    from ckptmove.model import TensorRecord


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


def stored_tensor(storage: StoredBytes, record: TensorRecord) -> LazyTensor | None:
    """A dense tensor of a storage; None if some of its elements are past the end."""
    whole = _whole(storage)
    is_whole = whole is not None and (record.dtype, record.shape) == (whole.dtype, whole.shape)
    if is_whole and not record.storage_offset and is_contiguous(record.shape, record.stride):
        return whole
    tensor = Strided(storage, record.dtype, record.shape, record.stride, record.storage_offset)
    reached = record.storage_offset + extent_numel(record.shape, record.stride)
    return tensor if reached * tensor.item <= storage.span.nbytes else None


def bytes_of_storage(storage: StoredBytes) -> LazyTensor:
    """All bytes of a storage in order: those of the tensor that it was made from, or its own."""
    return _whole(storage) or Strided(storage, "uint8", (storage.span.nbytes,), (1,))


def _whole(storage: StoredBytes) -> LazyTensor | None:
    """The tensor whose elements a storage has; None for another storage."""
    source, span, byteorder = storage
    is_whole = isinstance(source, Elements) and span == Span(0, source.tensor.nbytes) and byteorder == sys.byteorder
    return source.tensor if isinstance(source, Elements) and is_whole else None


def as_strided(tensor: LazyTensor) -> Strided:
    """A tensor as a contiguous view of its own elements."""
    storage = StoredBytes(Elements(tensor), Span(0, tensor.nbytes), sys.byteorder)
    return Strided(storage, tensor.dtype, tensor.shape, contiguous_stride(tensor.shape))
