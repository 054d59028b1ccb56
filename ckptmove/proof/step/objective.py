"""A quadratic objective with seeded slopes, for optimizers that evaluate their own gradients."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` of an optimizer requires a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def quadratic(parameters: Sequence[torch.Tensor], curvature: float) -> Callable[[], Any]:
    """A closure whose first gradients are the present gradients of the parameters.

    The objective is convex and each element has its own curvature. So a line search ends, and optimizers with different
    histories step to different points.

    Args:
        curvature: factor from the magnitude of a gradient to the curvature of its element.
    """
    starts = [parameter.detach().clone() for parameter in parameters]
    slopes = [one.grad for one in parameters if one.grad is not None]
    bends = [slope.abs() * curvature for slope in slopes]

    def closure() -> torch.Tensor:
        losses = []
        for parameter, start, slope, bend in zip(parameters, starts, slopes, bends, strict=True):
            away = parameter.detach() - start
            parameter.grad = slope + bend * away
            losses.append(_dot(slope + bend * away / 2, away))
        return sum(losses[1:], losses[0])

    return closure


def _dot(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Dot product; of complex tensors the real part of it."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return (one * other).sum()
