"""Cast arrays between floating dtypes as torch's ``Tensor.to`` does. Imports numpy, so import it only for a cast."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Float32s = npt.NDArray[np.float32]
    Patterns = npt.NDArray[np.uint32]

#: numpy's type codes. numpy has no bfloat16 and no float8: their elements are read as unsigned integers.
_CODES: Final = {
    "float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": "u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1",
}  # fmt: skip
#: The smallest float32 that is too large for each dtype: it rounds to infinity, or is cut to 448 in float8_e4m3fn,
#: which has no infinity. The halfway value between the largest number and the next power of two is too large, except
#: in float8_e4m3fn, where it rounds to the even 448.
_TOO_LARGE: Final = {
    "float64": np.float32("inf"),
    "float32": np.float32("inf"),
    "float16": np.float32(65520),
    "bfloat16": np.uint32(0x7F7F8000).view(np.float32),
    "float8_e4m3fn": np.nextafter(np.float32(464), np.float32("inf")),
    "float8_e5m2": np.float32(61440),
}
#: The smallest normal number of float16, 2**-14, and 2**16, the first power of two that is too large, as float32.
_FLOAT16_NORMAL: Final = np.uint32(113 << 23)
_FLOAT16_END: Final = np.uint32(143 << 23)
#: NaN as c10/util/Half.h and c10/util/BFloat16.h encode it, and NaN of both float8 dtypes.
_FLOAT16_NAN: Final = 0x7E00
_BFLOAT16_NAN: Final = 0x7FC0
_FLOAT8_NAN: Final = 0x7F


def cast(data: bytes | memoryview, source: str, target: str, order: str) -> tuple[bytes, int]:
    """Cast elements through float32, as torch does: float64 to float16 rounds twice.

    Returns the elements of ``target``, and the number of finite values that were too large for it. ``order`` is the
    byte order of both, ``<`` or ``>``.
    """
    stored = np.frombuffer(data, order + _CODES[source])
    with np.errstate(all="ignore"):
        # Values of float64 stay float64 for the count of infinities.
        values = stored if source == "float64" else _decoded(stored, source)
        singles = values.astype(np.float32, copy=False)
        too_large = int(np.count_nonzero(np.abs(singles) >= _TOO_LARGE[target]))
        if too_large:
            too_large -= int(np.count_nonzero(np.isinf(values)))
        return _encoded(singles, target).astype(order + _CODES[target], copy=False).tobytes(), too_large


def _decoded(stored: npt.NDArray[Any], dtype: str) -> Float32s:
    if dtype == "bfloat16":
        bits: Patterns = stored.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype.startswith("float8"):
        return _float8_values(dtype).take(stored)
    return stored.astype(np.float32, copy=False)


def _encoded(values: Float32s, dtype: str) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        return _to_bfloat16(values)
    if dtype == "float16":
        return _to_float16(values).astype(np.uint16).view(np.float16)
    if dtype.startswith("float8"):
        bits: Patterns = values.view(np.uint32)
        # The upper half of a float32 is a bfloat16. A last bit that is set for any nonzero lower half keeps a value
        # apart from the ties of float8, whose mantissa is shorter by at least four bits.
        codes: npt.NDArray[Any] = _float8_codes(dtype).take((bits >> 16) | ((bits & 0xFFFF) != 0))
        return codes
    return values.astype(_CODES[dtype], copy=False)


def _to_float16(values: Float32s) -> Patterns:
    """Round with integers: ``astype`` is 40 times slower for values that overflow or become subnormal."""
    bits = values.view(np.uint32)
    magnitudes = bits & 0x7FFFFFFF
    codes: Patterns = np.clip(magnitudes, _FLOAT16_NORMAL, _FLOAT16_END)
    codes += ((codes >> 13) & 1) + np.uint32(0xFFF)
    codes -= 112 << 23  # from the exponent bias of float32, 127, to that of float16, 15
    codes >>= 13
    # The difference between neighbours is 2**-24 in subnormals of float16 and in float32 from 0.5 on, so that the
    # addition rounds. It gives 0.5 + 2**-14 for normal numbers.
    subnormal = np.minimum(magnitudes, _FLOAT16_NORMAL).view(np.float32)
    subnormal += np.float32(0.5)
    codes += subnormal.view(np.uint32)
    codes -= np.float32(0.5 + 2**-14).view(np.uint32)
    codes[np.isnan(values)] = _FLOAT16_NAN
    codes |= (bits >> 16) & 0x8000
    return codes


def _to_bfloat16(values: Float32s) -> Patterns:
    bits = values.view(np.uint32)
    rounded: Patterns = bits >> np.uint32(16)
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    rounded[np.isnan(values)] = _BFLOAT16_NAN
    return rounded


@cache
def _float8_values(dtype: str) -> Float32s:
    # The values of all 256 patterns.
    patterns = np.arange(256, dtype=np.uint16)
    if dtype == "float8_e5m2":
        return (patterns << 8).view(np.float16).astype(np.float32)  # the upper half of a float16
    # One exponent bit less than float16, so that the bias is less by 8.
    values = ((patterns & 0x80) << 8 | (patterns & 0x7F) << 7).view(np.float16).astype(np.float32) * 256
    values[(patterns & 0x7F) == _FLOAT8_NAN] = np.nan
    return values


@cache
def _float8_codes(dtype: str) -> npt.NDArray[np.uint8]:
    """Return the rounded float8 of all 65,536 bfloat16 patterns."""
    positive = _float8_values(dtype)[:128]
    # Sorted by pattern. Infinity is in the place of the next power of two, 2**16 in float8_e5m2.
    ordered = np.minimum(positive[~np.isnan(positive)], 2.0**16)
    middles = (ordered[1:] + ordered[:-1]) / 2
    patterns = np.arange(1 << 16, dtype=np.uint16)
    magnitudes = _decoded(patterns & 0x7FFF, "bfloat16")
    lower, upper = np.searchsorted(middles, magnitudes), np.searchsorted(middles, magnitudes, side="right")
    codes = np.where(lower & 1, upper, lower).astype(np.uint8)  # they differ for ties
    codes[np.isnan(magnitudes)] = _FLOAT8_NAN
    return codes | (patterns >> 8 & 0x80).astype(np.uint8)
