"""How far values lie apart, where there is a torch that can tell.

Never imports torch before two values differ.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmove.comparison.differences import Gap
    from ckptmove.comparison.gaps import Measure


def measure(one: bytes, dtype: str, two: bytes, other: str) -> Gap | None:
    """As :func:`ckptmove.verification.magnitude.measure`; None, too, where there is no torch that works."""
    by_torch = measure_of_torch()
    return None if by_torch is None else by_torch(one, dtype, two, other)


@cache
def measure_of_torch() -> Measure | None:
    """What measures, or None where there is no torch that works."""
    try:
        from ckptmove.verification.magnitude import measure  # noqa: PLC0415  # equal values do not wait for torch
    except (ImportError, OSError):
        return None
    return measure
