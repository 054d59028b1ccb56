"""Views of lazy tensors. Those of a storage are views of the same storage; those of chunks are views of each chunk."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ckptmove.lazy.cast import Cast
from ckptmove.lazy.chunked import Chunked, joined
from ckptmove.lazy.geometry import view_stride
from ckptmove.lazy.stored import Strided, as_strided
from ckptmove.lazy.tensor import LazyTensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Flat(LazyTensor):
    """Elements from ``first`` on, in order, in a new shape."""

    def __init__(self, tensor: LazyTensor, first: int, shape: tuple[int, ...]) -> None:
        self.tensor, self.dtype, self.first, self.shape = tensor, tensor.dtype, first, shape

    @property
    def block_bytes(self) -> int:
        return self.tensor.block_bytes

    def read_into(self, first: int, memory: memoryview) -> None:
        self.tensor.read_into(self.first + first, memory)


def permuted(tensor: LazyTensor, axes: Sequence[int]) -> LazyTensor:
    """A tensor with its axes in another order."""
    if isinstance(tensor, Cast):
        return Cast(permuted(tensor.tensor, axes), tensor.dtype, tensor.overflowed)
    if isinstance(tensor, Chunked):
        chunks = [(_picked(offsets, axes), _picked(sizes, axes)) for offsets, sizes in tensor.chunks]
        load = tensor.load
        return Chunked(_picked(tensor.shape, axes), tensor.dtype, chunks, lambda place: permuted(load(place), axes))
    one = tensor if isinstance(tensor, Strided) else as_strided(tensor)
    return Strided(one.storage, one.dtype, _picked(one.shape, axes), _picked(one.stride, axes), one.offset)


def sliced(tensor: LazyTensor, offsets: Sequence[int], sizes: Sequence[int]) -> LazyTensor:
    """The part of a tensor from an index on along each axis."""
    shape = tuple(sizes)
    if isinstance(tensor, Cast):
        return Cast(sliced(tensor.tensor, offsets, sizes), tensor.dtype, tensor.overflowed)
    if isinstance(tensor, Chunked):
        return _sliced_chunks(tensor, offsets, shape)
    one = tensor if isinstance(tensor, Strided) else as_strided(tensor)
    offset = one.offset + sum(at * step for at, step in zip(offsets, one.stride, strict=True))
    return Strided(one.storage, one.dtype, shape, one.stride, offset)


def _sliced_chunks(tensor: Chunked, offsets: Sequence[int], shape: tuple[int, ...]) -> Chunked:
    parts, chunks = [], []
    for place, box in enumerate(tensor.chunks):
        begins = [max(at, own) for at, own in zip(offsets, box[0], strict=True)]
        ends = [min(at + size, own + extent) for at, size, own, extent in zip(offsets, shape, *box, strict=True)]
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        if min(sizes, default=1) > 0:
            chunks.append((tuple(begin - at for begin, at in zip(begins, offsets, strict=True)), sizes))
            parts.append((place, [begin - own for begin, own in zip(begins, box[0], strict=True)], sizes))

    def load(index: int) -> LazyTensor:
        place, begins, sizes = parts[index]
        return sliced(tensor.load(place), begins, sizes)

    return Chunked(shape, tensor.dtype, chunks, load)


def reshaped(tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    """The elements of a tensor in a new shape with as many elements."""
    return tensor if tensor.shape == tuple(shape) else _reshaped(tensor, 0, tuple(shape))


def flat(tensor: LazyTensor, first: int = 0, count: int | None = None) -> LazyTensor:
    """Elements of a tensor from ``first`` on, in order, as a tensor with one axis; without ``count`` to the last."""
    return _reshaped(tensor, first, (tensor.numel - first if count is None else count,))


def _reshaped(tensor: LazyTensor, first: int, shape: tuple[int, ...]) -> LazyTensor:
    if isinstance(tensor, Cast):
        return Cast(_reshaped(tensor.tensor, first, shape), tensor.dtype, tensor.overflowed)
    if isinstance(tensor, _Flat):
        return _Flat(tensor.tensor, tensor.first + first, shape)
    view = _view(tensor, first, shape) if isinstance(tensor, Strided) else None
    return _Flat(tensor, first, shape) if view is None else view


def _view(tensor: Strided, first: int, shape: tuple[int, ...]) -> Strided | None:
    """Elements from ``first`` on in a new shape, as a view of the same storage; None if that is not possible."""
    old, offset = (tensor.shape, tensor.stride), tensor.offset
    if prod(shape) != tensor.numel:
        line = view_stride(*old, (tensor.numel,))
        if line is None:
            return None
        old, offset = ((prod(shape),), line), offset + first * line[0]
    stride = view_stride(*old, shape)
    return None if stride is None else Strided(tensor.storage, tensor.dtype, shape, stride, offset)


def stacked(tensors: Sequence[LazyTensor], axis: int = 0) -> LazyTensor:
    """Tensors of one dtype and shape along a new axis, as ``torch.stack``."""
    return joined([reshaped(one, (*one.shape[:axis], 1, *one.shape[axis:])) for one in tensors], axis)


def _picked(values: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[axis] for axis in axes)
