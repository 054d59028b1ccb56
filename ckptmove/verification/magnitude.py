"""How far the values of two runs of elements lie apart.

Never looks at where they come from.
"""

from __future__ import annotations

from typing import Final

import torch

from ckptmove.differences import Gap
from ckptmove.verification.state import dtype_of

#: Beginnings of the names of dtypes whose elements are no numbers: torch ends the process over some of them.
_NO_NUMBERS: Final = ("quint", "qint", "bits", "float4")


def measure(first: bytes, dtype: str, second: bytes, other: str) -> Gap | None:
    """The largest differences between equally many elements.

    Args:
        first: the elements, in this machine's byte order.
        dtype: of them.
        second: the others.
        other: dtype of those.

    Returns:
        The gap, or None for dtypes whose elements are no numbers to torch.
    """
    one, two = _numbers(first, dtype), _numbers(second, other)
    if one is None or two is None:
        return None
    apart = (one - two).abs()
    apart[(one == two) | (one.isnan() & two.isnan())] = 0
    apart[apart.isnan()] = torch.inf
    scale = torch.maximum(one.abs(), two.abs())
    relative = torch.where(apart.isinf() | (scale == 0), apart, apart / scale)
    return Gap(apart.max().item(), relative.max().item())


def _numbers(raw: bytes, dtype: str) -> torch.Tensor | None:
    """Elements as the widest numbers of their kind."""
    if dtype.startswith(_NO_NUMBERS):
        return None
    values = torch.frombuffer(bytearray(raw), dtype=dtype_of(dtype))
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
