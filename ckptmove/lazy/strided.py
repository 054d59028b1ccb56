"""Read a part of a strided tensor, in memory that does not depend on the size of the tensor.

Imports numpy, so import it only for a tensor that needs it.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckptmove.io.part import read_into
from ckptmove.lazy.geometry import Axis, boxes, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ckptmove.io.part import Readable

#: Bytes of the source in memory.
_CHUNK: Final = 8 << 20
#: Shorter gaps between runs are read too: it costs less than another read.
_GAP: Final = 1 << 10
_LARGEST_WORD: Final = 8


def read_strided(source: Readable, start: int, axes: Sequence[Axis], item: int, first: int, memory: memoryview) -> None:
    """Read the elements of a tensor from ``first`` on, in order, until the memory is full.

    Each byte of the source is read at most once, unless it is near the next run of another part. ``start`` and the
    steps are in bytes; no size is 0.
    """
    dtype = np.dtype(f"u{item}" if item <= _LARGEST_WORD else f"V{item}")
    axes = merged(axes)
    done = 0
    for offsets, sizes in boxes([axis.size for axis in axes], first, first + len(memory) // item):
        place = start + sum(at * axis.step for at, axis in zip(offsets, axes, strict=True))
        tile = np.frombuffer(memory, dtype, prod(sizes), done).reshape(sizes)
        _fill(tile, source, place, [Axis(size, axis.step) for size, axis in zip(sizes, axes, strict=True)])
        done += tile.nbytes


def _fill(tile: npt.NDArray[Any], source: Readable, start: int, axes: Sequence[Axis]) -> None:
    """Read the elements of a tile.

    The axes with the shortest steps form a run of bytes. The next axis has several runs, which are copied together. The
    other axes are iterated.
    """
    item = tile.itemsize
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
    count = min((_CHUNK - run) // max(pitch, 1) + 1, size)
    buffer = memoryview(bytearray((count - 1) * pitch + run))
    inside = sorted(set(range(len(axes))).difference(others))
    for indices in np.ndindex(*[axes[axis].size for axis in others]):  # itertools.product would hold all of each axis
        place = start + sum(index * axes[axis].step for axis, index in zip(others, indices, strict=True))
        where: list[int | slice] = [slice(None)] * len(axes)
        for axis, index in zip(others, indices, strict=True):
            where[axis] = index
        for first in range(0, size, count):
            runs = min(count, size - first)
            begin = place + first * step
            if with_gaps:
                read_into(source, begin, buffer[: (runs - 1) * pitch + run])
            else:
                for one in range(runs):
                    read_into(source, begin + one * step, buffer[one * run : (one + 1) * run])
            where[along] = slice(first, first + runs)
            sizes = [runs if axis == along else axes[axis].size for axis in inside]
            steps = [pitch if axis == along else axes[axis].step for axis in inside]
            tile[tuple(where)] = np.ndarray(sizes, tile.dtype, buffer, strides=steps)
