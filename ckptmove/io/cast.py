"""Cast elements to another floating dtype, one block at a time, as torch's ``Tensor.to`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedArchive
from ckptmove.torch_facts.dtypes import COMPLEX_PARTS, ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptmove.io.contracts import CastSegment

#: Bytes of source elements to cast at a time; a multiple of every element size. The C library returns larger
#: arrays to the system after each use, and new pages cost more than the cast.
CAST_BLOCK: Final = 1 << 16


def cast_blocks(
    blocks: Iterable[bytes | memoryview],
    segment: CastSegment,
    path: str,
    overflowed: Callable[[int], None] | None = None,
) -> Iterator[bytes]:
    """Cast the blocks of a segment, each of whole elements.

    Values are rounded to nearest, ties to even. Values that are too large become infinite; float8_e4m3fn has no
    infinity, and they become its largest number, as in torch 2.13. ``overflowed`` is called for each block with values
    that overflow, with the number of finite values that were too large; a complex number counts as two values.
    """
    from ckptmove.io.floats import cast

    if segment.nbytes % ITEM_BYTES[segment.source]:
        raise DamagedArchive(path, f"{segment.nbytes} bytes are not a whole number of {segment.source} elements")
    source, target = (COMPLEX_PARTS.get(dtype, dtype) for dtype in (segment.source, segment.target))
    order = "<" if segment.byteorder == "little" else ">"
    for block in blocks:
        data, too_large = cast(block, source, target, order)
        if too_large and overflowed is not None:
            overflowed(too_large)
        yield data
