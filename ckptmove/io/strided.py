"""Read the elements of a strided tensor in order, in memory that does not depend on its size.

Imports numpy, so import it only for a tensor that needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    #: Returns the bytes from one offset to another (exclusive).
    Read: TypeAlias = Callable[[int, int], bytes]

#: Bytes of consecutive elements that are collected at a time. In a transposed matrix, they are a strip of columns: a
#: wider strip has longer runs of bytes.
_TILE: Final = 32 << 20
#: Bytes of the source in memory.
_CHUNK: Final = 8 << 20
#: Shorter gaps between runs are read too: it costs less than another read.
_GAP: Final = 1 << 10
_BLOCK: Final = 1 << 20
_LARGEST_WORD: Final = 8


class _Axis(NamedTuple):
    """An axis of a tensor: its size in elements, and its stride in bytes."""

    size: int
    step: int


def strided_blocks(read: Read, start: int, shape: Sequence[int], stride: Sequence[int], item: int) -> Iterator[bytes]:
    """Yield the elements of a tensor in order, in blocks.

    For each 32 MiB of elements, a byte of the source is read at most once. ``start`` is in bytes, ``stride`` in
    elements of ``item`` bytes; no size is 0.
    """
    outer = _merged([_Axis(size, step * item) for size, step in zip(shape, stride, strict=True) if size != 1])
    inner: list[_Axis] = []
    nbytes = item
    while len(outer) > 1 and nbytes * outer[-1].size <= _TILE:
        nbytes *= outer[-1].size
        inner.insert(0, outer.pop())
    rows, count = outer.pop(), max(_TILE // nbytes, 1)
    for indices in _indices(outer):
        place = _place(start, outer, indices)
        for first in range(0, rows.size, count):
            axes = (_Axis(min(count, rows.size - first), rows.step), *inner)
            data = _tile(read, place + first * rows.step, axes, item).reshape(-1).view(np.uint8).data
            yield from (bytes(data[at : at + _BLOCK]) for at in range(0, len(data), _BLOCK))
            del data  # before the memory of the next tile is needed


def _merged(axes: list[_Axis]) -> list[_Axis]:
    """Merge neighboring axes that have the elements of one longer axis; at least one axis is returned."""
    merged = [_Axis(1, 0)]
    for size, step in axes:
        outer = merged[-1]
        if outer.size == 1 or outer.step == size * step:
            merged[-1] = _Axis(outer.size * size, step)
        else:
            merged.append(_Axis(size, step))
    return merged


def _indices(axes: Sequence[_Axis]) -> Iterator[tuple[int, ...]]:
    """Iterate over the indices of all elements in order; ``itertools.product`` would hold all indices of each axis."""
    if not axes:
        yield ()
        return
    for outer in _indices(axes[:-1]):
        for last in range(axes[-1].size):
            yield *outer, last


def _place(start: int, axes: Sequence[_Axis], indices: Sequence[int]) -> int:
    return start + sum(index * axis.step for index, axis in zip(indices, axes, strict=True))


def _tile(read: Read, start: int, axes: Sequence[_Axis], item: int) -> npt.NDArray[Any]:
    """Return the elements of a tile.

    The axes with the shortest steps form a run of bytes. The next axis has several runs, which are copied together. The
    other axes are iterated.
    """
    dtype = np.dtype(f"u{item}" if item <= _LARGEST_WORD else f"V{item}")
    tile = np.empty([axis.size for axis in axes], dtype)
    order = sorted(range(len(axes)), key=lambda axis: axes[axis].step)
    run = item
    while len(order) > 1:
        size, step = axes[order[0]]
        if step - run > _GAP or run + (size - 1) * step > _CHUNK:
            break
        run += (size - 1) * step
        del order[0]
    along, *others = order
    size, step = axes[along]
    with_gaps = step - run <= _GAP
    pitch = step if with_gaps else run  # distance of two runs in memory
    count = (_CHUNK - run) // max(pitch, 1) + 1
    inside = sorted(set(range(len(axes))).difference(others))
    for indices in _indices([axes[axis] for axis in others]):
        place = _place(start, [axes[axis] for axis in others], indices)
        where: list[int | slice] = [slice(None)] * len(axes)
        for axis, index in zip(others, indices, strict=True):
            where[axis] = index
        for first in range(0, size, count):
            runs = min(count, size - first)
            begin, end = place + first * step, place + (first + runs) * step
            if with_gaps:
                data = read(begin, end - step + run)
            else:
                data = b"".join([read(at, at + run) for at in range(begin, end, step)])
            where[along] = slice(first, first + runs)
            sizes = [runs if axis == along else axes[axis].size for axis in inside]
            steps = [pitch if axis == along else axes[axis].step for axis in inside]
            tile[tuple(where)] = np.ndarray(sizes, dtype, data, strides=steps)
    return tile
