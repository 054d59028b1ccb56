"""Shapes, strides, and the places of elements."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Axis(NamedTuple):
    """An axis of a strided tensor."""

    size: int
    step: int  # distance of two neighbors


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The stride of a contiguous tensor, in elements."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor are in order and without gaps, as torch decides."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def extent_numel(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from a tensor's first to its last, with gaps; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def merged(axes: Sequence[Axis]) -> list[Axis]:
    """The same elements with fewer axes: neighbors that are one longer axis are merged. At least one is returned."""
    found = [Axis(1, 0)]
    for size, step in axes:
        outer = found[-1]
        if outer.size == 1 or size == 1:
            found[-1] = Axis(size, step) if outer.size == 1 else outer
        elif outer.step == size * step:
            found[-1] = Axis(outer.size * size, step)
        else:
            found.append(Axis(size, step))
    return found


def view_stride(shape: Sequence[int], stride: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """The stride with which a tensor has a new shape and the same elements in order; None if no stride does."""
    if 0 in new:
        return contiguous_stride(new)
    axes = merged([Axis(*axis) for axis in zip(shape, stride, strict=True)])
    size, step = axes.pop()
    found = []
    for want in reversed(new):
        if size == 1 and axes and want != 1:
            size, step = axes.pop()
        if size % want:
            return None
        found.append(step)
        size, step = size // want, step * want
    return tuple(reversed(found))


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes that the elements ``first`` to ``last`` of a tensor fill, in order: offsets and sizes of each.

    ``shape`` has at least one axis. There are at most two boxes for each axis but the last.
    """
    row = prod(shape[1:])
    if len(shape) == 1:
        yield (first,), (last - first,)
        return
    while first < last:
        index, start = divmod(first, row)
        count = last // row - index
        if start or not count:  # a part of a row
            end = min(row, start + last - first)
            for offsets, sizes in boxes(shape[1:], start, end):
                yield (index, *offsets), (1, *sizes)
            first += end - start
        else:
            yield (index, *[0] * (len(shape) - 1)), (count, *shape[1:])
            first += count * row
