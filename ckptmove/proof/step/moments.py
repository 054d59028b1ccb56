"""Check that the moments of a parameter can result from one sequence of gradients.

Adam keeps ``m``, a weighted mean of gradients, and ``v``, one of their squares. By the Cauchy-Schwarz inequality
``m * m`` is at most ``c * v`` in every element for any gradients, with
``c = (1 - b1)**2 / ((1 - b2) * (1 - b1**2 / b2))``. Adamax's ``exp_inf`` decays by ``b2`` from the largest gradient,
so ``|m|`` is at most ``(1 - b1) / (1 - b1 / b2)`` times it. LBFGS keeps ``1 / (y . s)`` for each pair ``y`` and ``s``
of its history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ckptmove.proof.tensors.dtypes import dtype_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.proof.tensors.pieces import ParameterPiece, TensorSource

#: Factor on the bounds, because schedules change the betas during training and elements are rounded.
_SLACK: Final = 16.0
#: Smaller values of ``v`` may have been rounded to zero.
_LEAST_SQUARE: Final = 1e-30
#: Rounding errors of LBFGS: a dot product rounds in each addition, its inverse once more.
_ROUNDINGS: Final = 64.0
#: Dtypes to check; half precision rounds ``v`` to zero far earlier.
_DTYPES: Final = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128})
_MOMENTS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf")
_DEFAULT_BETAS: Final = (0.9, 0.999)


def disagreement(piece: ParameterPiece, source: TensorSource, options: Mapping[str, object]) -> str:
    """Contradictions between the moments of a piece, as text; empty if consistent."""
    records = dict(piece.entry.tensors) if piece.entry is not None else {}
    return contradiction({key: piece.of(records[key], source) for key in _MOMENTS if key in records}, options)


def contradiction(state: Mapping[str, torch.Tensor], options: Mapping[str, object]) -> str:
    """Contradictions between the moments of the same elements of a parameter, as text; empty if consistent."""
    moments = {key: state[key] for key in _MOMENTS if key in state}
    mean = moments.get("exp_avg")
    if mean is None or any(one.dtype not in _DTYPES or one.shape != mean.shape for one in moments.values()):
        return ""
    first, second = _betas(options)
    found = []
    if "exp_avg_sq" in moments and first * first < second:
        bound = (1 - first) ** 2 / ((1 - second) * (1 - first * first / second))
        found.append(_exceeding("exp_avg_sq", mean, moments["exp_avg_sq"].abs().float() * (_SLACK * bound)))
    if "exp_inf" in moments and first < second:
        bound = _SLACK * ((1 - first) / (1 - first / second)) ** 2
        found.append(_exceeding("exp_inf", mean, moments["exp_inf"].float() ** 2 * bound))
    if "max_exp_avg_sq" in moments and "exp_avg_sq" in moments:
        largest, now = moments["max_exp_avg_sq"].abs(), moments["exp_avg_sq"].abs()
        below = int((largest < now).sum())
        found.append(f"max_exp_avg_sq is less than exp_avg_sq in {below:,} values" if below else "")
    return "; ".join(filter(None, found))


def broken_history(piece: ParameterPiece, source: TensorSource) -> str:
    """The first contradiction in the history of LBFGS, as text; empty if consistent."""
    records = dict(piece.entry.tensors) if piece.entry is not None else {}
    for index in range(sum(key.startswith("ro.") for key in records)):
        keys = (f"old_dirs.{index}", f"old_stps.{index}", f"ro.{index}")
        if not records.keys() >= set(keys):
            return f"the history has no {next(key for key in keys if key not in records)}"
        change, step, inverse = (source.tensor(records[key]).double() for key in keys)
        if change.shape != step.shape:
            return f"{keys[0]} is {list(change.shape)}, {keys[1]} is {list(step.shape)}"
        products = change * step
        slack = _ROUNDINGS * torch.finfo(dtype_of(records[keys[0]].dtype)).eps * float(products.abs().sum())
        if not abs(float(products.sum() * inverse) - 1) <= slack * abs(float(inverse)):
            return f"{keys[2]} is {float(inverse):.6g}, which is not 1 / ({keys[0]} . {keys[1]})"
    return ""


def _exceeding(key: str, mean: torch.Tensor, bound: torch.Tensor) -> str:
    """Text with the number of values whose square exceeds the bound; empty for zero."""
    size = (mean.abs() if mean.is_complex() else mean).float()
    # Only contradictions and NaN have to be counted, which takes three times as long.
    if not size.numel() or bool(torch.addcmul(bound, size, size, value=-1).min() >= 0):
        return ""
    count = int((size**2 > bound.clamp(min=_LEAST_SQUARE)).sum())
    return f"{key} is too small for exp_avg in {count:,} of {size.numel():,} values" if count else ""


def _betas(options: Mapping[str, object]) -> tuple[float, float]:
    match options.get("betas"):
        case (float(first), float(second)) if 0 <= first < 1 and 0 < second < 1:
            return first, second
    return _DEFAULT_BETAS
