"""What an optimizer minimises that evaluates its own gradients: a quadratic with seeded slopes.

Never looks at the model, and never records a graph.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer cannot be made without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def quadratic(parameters: Sequence[torch.Tensor], curvature: float) -> Callable[[], Any]:
    """A closure whose gradients begin as those that the parameters have now.

    Convex, with a curvature of its own in each element, so that a line search ends and no direction is the best at
    once: steps from other histories end elsewhere.

    Args:
        parameters: each with its gradient.
        curvature: what the magnitude of each gradient is multiplied with, to make the curvature there.
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
    """The sum of products; of complex values, their real part."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return (one * other).sum()
