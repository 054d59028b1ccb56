"""Read the elements of a tensor from a file, in torch's order.

Memory is one block, or at most 64 MiB if the elements are not in order in the file.
"""

from __future__ import annotations

import sys
from array import array
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING, Final, Literal

from ckptmove.io.cut import in_blocks
from ckptmove.model import Span
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.io.part import Readable
    from ckptmove.lazy.stored import StoredBytes
    from ckptmove.model import TensorRecord

#: Elements in a block; the largest element has 16 bytes.
BLOCK_ELEMENTS: Final = 1 << 16
#: Largest extent of a tensor that is read as a whole.
_MOST_READ: Final = 32 << 20
#: Formats of memoryview and array by word size.
_WORDS: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
_LARGEST_WORD: Final = 8


def extent_span(storage: Span, record: TensorRecord) -> Span | None:
    """Return the bytes from a tensor's first element to its last; None if some are past the end of its storage."""
    item = ITEM_BYTES[record.dtype]
    start = storage.start + record.storage_offset * item
    end = start + extent_numel(record.shape, record.stride) * item
    return Span(start, end) if end <= storage.end else None


def extent_numel(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from a tensor's first to its last, with gaps; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def overlaps(record: TensorRecord) -> bool:
    """Whether some elements of a tensor must share bytes, as in an expanded tensor."""
    return prod(record.shape) > extent_numel(record.shape, record.stride)


def fills_extent(record: TensorRecord) -> bool:
    """Whether a tensor has as many elements as its extent: in any order, but without gaps."""
    return prod(record.shape) == extent_numel(record.shape, record.stride)


def blocks(
    stored: StoredBytes, record: TensorRecord, span: Span, byteorder: Literal["little", "big"] = sys.byteorder
) -> Iterator[bytes]:
    """Iterate over a tensor's elements in order; each block but the last has ``BLOCK_ELEMENTS``.

    ``span`` is the :func:`extent_span` of the tensor. The blocks have the native byte order, unless another is
    requested.
    """
    item = ITEM_BYTES[record.dtype]
    if is_contiguous(record):
        found = _read(stored, span, item * BLOCK_ELEMENTS)
    else:
        found = in_blocks(_in_order(stored.source, record, span), item * BLOCK_ELEMENTS)
    return _ordered(record, found, stored.byteorder, byteorder)


def raw_blocks(stored: StoredBytes, record: TensorRecord, span: Span) -> Iterator[bytes]:
    """Iterate over the elements of a tensor's extent in the order of the file, with gaps, in native byte order."""
    found = _read(stored, span, ITEM_BYTES[record.dtype] * BLOCK_ELEMENTS)
    return _ordered(record, found, stored.byteorder, sys.byteorder)


def little_endian(record: TensorRecord, found: Iterable[bytes | memoryview], byteorder: str) -> Iterator[bytes]:
    """Iterate over the elements of a contiguous tensor, little-endian, in blocks of at most ``BLOCK_ELEMENTS``."""
    return _ordered(record, in_blocks(found, ITEM_BYTES[record.dtype] * BLOCK_ELEMENTS), byteorder, "little")


def _ordered(record: TensorRecord, found: Iterator[bytes], source: str, target: str) -> Iterator[bytes]:
    """Change the byte order of blocks of whole elements."""
    item = ITEM_BYTES[record.dtype]
    word = item // 2 if record.dtype.startswith("complex") else item
    return (_swapped(block, word) for block in found) if source != target and word > 1 else found


def is_contiguous(record: TensorRecord) -> bool:
    """Whether a tensor is contiguous."""
    expected = 1
    for size, step in zip(reversed(record.shape), reversed(record.stride), strict=True):
        if size != 1 and step != expected:
            return 0 in record.shape
        expected *= size
    return True


def _read(stored: StoredBytes, span: Span, nbytes: int) -> Iterator[bytes]:
    for start in range(span.start, span.end, nbytes):
        yield stored.source.read(start, min(start + nbytes, span.end))


def _in_order(source: Readable, record: TensorRecord, span: Span) -> Iterator[bytes]:
    """Iterate over the elements of a tensor that is not contiguous, in order."""
    item = ITEM_BYTES[record.dtype]
    if span.nbytes <= _MOST_READ:
        return _strided(source.read(span.start, span.end), record, item)
    from ckptmove.io.strided import strided_blocks  # imports numpy, only for a large tensor

    return strided_blocks(source.read, span.start, record.shape, record.stride, item)


def _strided(data: bytes, record: TensorRecord, item: int) -> Iterator[bytes]:
    """Iterate over the elements of a tensor that is not contiguous, one row or part of a row at a time."""
    axes = [axis for axis in zip(record.shape, record.stride, strict=True) if axis[0] != 1]
    if item > _LARGEST_WORD:
        item, axes = item // 2, [*((size, 2 * step) for size, step in axes), (2, 1)]
    words = memoryview(data).cast(_WORDS[item])
    row, step = axes.pop()
    for place in _places(axes):
        for begin in range(0, row, BLOCK_ELEMENTS):
            count = min(row - begin, BLOCK_ELEMENTS)
            first = place + begin * step
            found = words[first : first + count * step : step] if step else words[place : place + 1]
            yield found.tobytes() if step else found.tobytes() * count


def _places(axes: list[tuple[int, int]]) -> Iterator[int]:
    """Iterate over the starts of the rows; a list of them could be larger than the tensor."""
    if not axes:
        yield 0
        return
    *outer, (size, step) = axes  # each axis has two or more elements, so there are at most 63 axes
    for place in _places(outer):
        yield from range(place, place + size * step, step) if step else repeat(place, size)


def _swapped(block: bytes, word: int) -> bytes:
    words = array(_WORDS[word], block)
    words.byteswap()
    return words.tobytes()
