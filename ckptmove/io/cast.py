"""Cast elements to the next smaller dtype: float64 to float32, complex128 to complex64.

Rounds as torch's ``Tensor.to`` does: to nearest, ties to even, and to infinity if the value is too large.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptmove.io.contracts import CastSegment

#: Bytes of source elements to cast at a time; a multiple of every element size. The cast goes through Python floats,
#: so that larger blocks are not faster.
CAST_BLOCK: Final = 1 << 18
#: Both casts halve the size: a complex number is two floats, each half as long afterwards.
SHRINK: Final = 2
#: All casts, with the size in bytes of a source element.
_ITEM_BYTES: Final[dict[tuple[str, str], int]] = {("float64", "float32"): 8, ("complex128", "complex64"): 16}


#: Infinity as a float32 of this machine: plus and minus.
_INFINITIES: Final = tuple(array("f", [math.copysign(math.inf, sign)]).tobytes() for sign in (1, -1))


def cast_blocks(
    blocks: Iterable[bytes | memoryview],
    segment: CastSegment,
    path: str,
    overflowed: Callable[[int], None] | None = None,
) -> Iterator[bytes]:
    """Cast the blocks of a segment, each of whole elements.

    Args:
        blocks: the segment's bytes, in blocks of ``CAST_BLOCK``.
        segment: the dtypes and the byte order.
        path: for errors.
        overflowed: called for each block with values that overflow, with the number of finite values that became
            infinite; a complex number counts as two values.

    Raises:
        DamagedArchive: if the bytes are not a whole number of elements.
    """
    if segment.nbytes % _ITEM_BYTES[segment.source, segment.target]:
        raise DamagedArchive(path, f"{segment.nbytes} bytes are not a whole number of {segment.source} elements")
    foreign = segment.byteorder != sys.byteorder
    for block in blocks:
        wide = array("d")
        wide.frombytes(block)
        if foreign:
            wide.byteswap()
        narrow = array("f", wide)
        if overflowed is not None:
            data = narrow.tobytes()
            # Counting takes as long as the cast itself; searching bytes takes almost no time.
            if any(infinity in data for infinity in _INFINITIES):
                overflowed(_infinite(narrow) - _infinite(wide))
        if foreign:
            narrow.byteswap()
        yield narrow.tobytes()


def _infinite(values: array[float]) -> int:
    return values.count(math.inf) + values.count(-math.inf)
