"""Measure the largest absolute and relative differences between two arrays of elements."""

from __future__ import annotations

from itertools import compress
from typing import Final

import torch

from ckptmove.comparison.differences import Gap
from ckptmove.proof.tensors.dtypes import dtype_of

#: Prefixes of dtypes without arithmetic; torch aborts the process on some operations with them.
_NO_NUMBERS: Final = ("quint", "qint", "bits", "float4")
_INTEGERS: Final = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"})
#: float64 represents every integer up to twice this value.
_EXACT: Final = 2**52
_LARGEST_ITEM: Final = 8


def measure(first: bytes, dtype: str, second: bytes, other: str) -> Gap | None:
    """The largest differences between two arrays of equal length.

    Args:
        first: elements of one array, in this machine's byte order.
        second: elements of the other array.

    Returns:
        The differences; None for dtypes without arithmetic in torch.
    """
    if dtype.startswith(_NO_NUMBERS) or other.startswith(_NO_NUMBERS):
        return None
    ours, theirs = _elements(first, dtype), _elements(second, other)
    if {dtype, other} <= _INTEGERS and not (_is_small(ours) and _is_small(theirs)):
        return _of_integers(ours, theirs)
    one, two = _widest(ours), _widest(theirs)
    apart = (one - two).abs()
    apart[(one == two) | (one.isnan() & two.isnan())] = 0
    apart[apart.isnan()] = torch.inf
    if any(name in _INTEGERS and not _is_small(values) for name, values in ((dtype, ours), (other, theirs))):
        _restore(apart, ours, theirs)
    scale = torch.maximum(one.abs(), two.abs())
    relative = torch.where(apart.isinf() | (scale == 0), apart, apart / scale)
    return Gap(apart.max().item(), relative.max().item())


def _elements(raw: bytes, dtype: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype_of(dtype))


def _widest(values: torch.Tensor) -> torch.Tensor:
    """Convert elements to float64 or complex128."""
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _is_small(values: torch.Tensor) -> bool:
    """Whether float64 represents all of these integers and their differences exactly."""
    if values.dtype.itemsize < _LARGEST_ITEM:
        return True
    # An unsigned number that is too large for int64 is negative in this view.
    signed = values.view(torch.int64)
    least = 0 if values.dtype is torch.uint64 else -_EXACT
    return bool((signed >= least).all() and (signed <= _EXACT).all())


def _restore(apart: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Measure again, exactly, the pairs that float64 rounds to equal numbers."""
    alike = apart == 0
    sides = (_widest(one).real if one.is_complex() or one.is_floating_point() else one for one in (ours, theirs))
    pairs = compress(zip(*(side.tolist() for side in sides), strict=True), alike.tolist())
    apart[alike] = torch.tensor([abs(int(mine) - int(other)) for mine, other in pairs], dtype=apart.dtype)


def _of_integers(one: torch.Tensor, two: torch.Tensor) -> Gap:
    """The differences between integers that are too large for float64."""
    if one.dtype == two.dtype:
        differ = one.view(torch.int64) != two.view(torch.int64)
        one, two = one.view(torch.int64)[differ].view(one.dtype), two.view(torch.int64)[differ].view(two.dtype)
    largest, relative = 0, 0.0
    for mine, other in zip(one.tolist(), two.tolist(), strict=True):
        apart = abs(mine - other)
        largest = max(largest, apart)
        relative = max(relative, apart / max(abs(mine), abs(other), 1))
    return Gap(largest, relative)
