"""Measure the distance between the values of two tensors, with NaN on one side only counted separately.

Tensors are read block by block: memory holds one block of each at a time. The caller provides the measure.
"""

from __future__ import annotations

import struct
from itertools import compress
from math import inf, isinf, isnan
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.comparison.differences import Gap, LoneNan
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    #: Distance between two blocks with equally many elements, each with its dtype; None if it cannot be measured.
    Measure: TypeAlias = Callable[[bytes, str, bytes, str], Gap | None]

#: Format characters of ``struct`` for dtypes that have NaN.
_FORMATS: Final = {"float16": "e", "float32": "f", "float64": "d"}
#: Bytes that are NaN, for dtypes of one byte.
_NAN_BYTES: Final = {
    "float8_e5m2": b"\x7d\x7e\x7f\xfd\xfe\xff", "float8_e4m3fn": b"\x7f\xff", "float8_e8m0fnu": b"\xff",
    "float8_e4m3fnuz": b"\x80", "float8_e5m2fnuz": b"\x80",
}  # fmt: skip
_COMPLEX: Final = {
    "complex32": "float16", "bcomplex32": "bfloat16", "complex64": "float32", "complex128": "float64",
}  # fmt: skip


def gap_between(
    pairs: Iterable[tuple[bytes, bytes]], dtype: str, other: str, measure: Measure
) -> tuple[bool, Gap | None]:
    """Whether any block differs from its counterpart, and the gap between them.

    Args:
        pairs: blocks of elements, in this machine's byte order.
        dtype: dtype of the first block of each pair.
        measure: called for blocks whose bytes or dtypes differ.
    """
    differ, gap = False, Gap(0.0, 0.0)
    elements = first = second = 0
    for one, two in pairs:
        elements += len(one) // ITEM_BYTES[dtype]
        if dtype == other and one == two:
            continue
        found = measure(one, dtype, two, other)
        if found is None:
            return dtype == other, None
        # Within one dtype, different bits are a difference, even those of 0.0 and -0.0 or of two NaN.
        differ = differ or dtype == other or found.max_abs > 0
        if isinf(found.max_abs) or isnan(found.max_rel):
            ours, theirs = _nan_flags(one, dtype), _nan_flags(two, other)
            first += sum(map(int.__gt__, ours, theirs))
            second += sum(map(int.__gt__, theirs, ours))
            left = _without(one, dtype, ours, theirs), _without(two, other, ours, theirs)
            found = (measure(left[0], dtype, left[1], other) if left[0] else None) or Gap(0.0, 0.0)
        gap = Gap(max(gap.max_abs, found.max_abs), max(gap.max_rel, found.max_rel))
    if first or second:
        gap = Gap(inf, inf, LoneNan(first, second, elements, gap.max_abs, gap.max_rel))
    return differ, gap if differ else None


def _nan_flags(block: bytes, dtype: str) -> bytes:
    """One byte for each element: 1 for NaN, else 0."""
    if dtype in _COMPLEX:
        parts = _nan_flags(block, _COMPLEX[dtype])
        return bytes(map(int.__or__, parts[::2], parts[1::2]))
    if dtype in _NAN_BYTES:
        return block.translate(bytes(byte in _NAN_BYTES[dtype] for byte in range(256)))
    count = len(block) // ITEM_BYTES[dtype]
    if dtype == "bfloat16":  # the upper half of a float32
        words = struct.unpack(f"={count}H", block)
        block, dtype = struct.pack(f"={count}I", *(word << 16 for word in words)), "float32"
    if dtype not in _FORMATS:
        return bytes(count)
    return bytes(map(isnan, struct.unpack(f"={count}{_FORMATS[dtype]}", block)))


def _without(block: bytes, dtype: str, *flags: bytes) -> bytes:
    """Elements of a block that are not NaN on either side."""
    item = ITEM_BYTES[dtype]
    stays = bytes(not any(both) for both in zip(*flags, strict=True))
    return bytes(compress(block, (stay for stay in stays for _ in range(item))))
