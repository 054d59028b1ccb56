"""Measure the differences between values if torch is installed. torch is imported when the first values differ."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmove.comparison.differences import Gap
    from ckptmove.comparison.gaps import Measure


def measure_with_torch(one: bytes, dtype: str, two: bytes, other: str) -> Gap | None:
    """Call :func:`ckptmove.proof.tensors.magnitude.measure_with_torch`; None if torch cannot be imported."""
    by_torch = measure_of_torch()
    return None if by_torch is None else by_torch(one, dtype, two, other)


@cache
def measure_of_torch() -> Measure | None:
    """The measuring function, or None if torch cannot be imported."""
    try:
        from ckptmove.proof.tensors.magnitude import measure  # importing torch takes seconds
    except (ImportError, OSError):
        return None
    return measure
