"""Where the elements of a tensor are in its storage."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ckptmove.lazy.geometry import extent_numel
from ckptmove.model import Span
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from ckptmove.model import TensorRecord


def extent_span(storage: Span, record: TensorRecord) -> Span | None:
    """Return the bytes from a tensor's first element to its last; None if some are past the end of its storage."""
    item = ITEM_BYTES[record.dtype]
    start = storage.start + record.storage_offset * item
    end = start + extent_numel(record.shape, record.stride) * item
    return Span(start, end) if end <= storage.end else None


def overlaps(record: TensorRecord) -> bool:
    """Whether some elements of a tensor must share bytes, as in an expanded tensor."""
    return prod(record.shape) > extent_numel(record.shape, record.stride)


def fills_extent(record: TensorRecord) -> bool:
    """Whether a tensor has as many elements as its extent: in any order, but without gaps."""
    return prod(record.shape) == extent_numel(record.shape, record.stride)
