"""Run composite operations of a simulated device as a whole on the CPU, with the CPU's backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ckptmove.verification.simulated.rules import operand_devices
from ckptmove.verification.simulated.targets import tag_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload


def run_whole(
    func: OpOverload[..., Any],
    inner: Callable[[Any], Any],
    place: Callable[[torch.Tensor, torch.device], torch.Tensor],
) -> Callable[..., Any]:
    """A function that runs a composite operation on the CPU.

    Args:
        func: the operation.
        inner: returns the CPU tensor of a tensor of the device.
        place: wraps a CPU tensor as a tensor of the device, with the same memory.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return _WholeOp.apply(func, spec, inner, place, *leaves)  # type: ignore[no-untyped-call]  # torch has no annotation

    return run


class _WholeOp(torch.autograd.Function):
    """A composite op as one autograd function, with the CPU's own backward."""

    @staticmethod
    def forward(ctx: Any, func: Any, spec: Any, inner: Any, place: Any, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        device = operand_devices(func, args, kwargs, tag_of)[0]
        hosts = [inner(leaf) for leaf in leaves]
        needed = [at for at, wanted in enumerate(ctx.needs_input_grad[-len(leaves) :]) if wanted]
        for at in needed:
            hosts[at] = hosts[at].detach().requires_grad_()
        args, kwargs = pytree.tree_unflatten(hosts, spec)
        with torch.enable_grad():
            results = func(*args, **kwargs)
        ctx.needed, ctx.device, ctx.given = needed, device, [hosts[at] for at in needed]
        ctx.inner, ctx.place, ctx.leaves = inner, place, len(leaves)
        ctx.made = results if isinstance(results, tuple) else (results,)
        return pytree.tree_map(lambda made: place(made.detach(), device), results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hosts = torch.autograd.grad(ctx.made, ctx.given, [ctx.inner(grad) for grad in grads], allow_unused=True)
        result: list[Any] = [None] * len(ctx.needs_input_grad)
        first = len(result) - ctx.leaves
        for at, host in zip(ctx.needed, hosts, strict=True):
            result[first + at] = None if host is None else ctx.place(host, ctx.device)
        return tuple(result)
