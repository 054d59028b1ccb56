"""Run functions of a simulated device as a whole on the CPU, with the CPU's backward.

These are composite operations, and functions of compressed sparse tensors, whose layout C++ code cannot read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from ckptmove.verification.simulated.accounting import counting_saved
from ckptmove.verification.simulated.half_precision import compute
from ckptmove.verification.simulated.mps import refuse_on_mps
from ckptmove.verification.simulated.rules import operand_devices, schema_of
from ckptmove.verification.simulated.targets import home_of, kind_of, tag_of
from ckptmove.verification.simulated.unsupported import NotSimulated

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

#: Layouts of tensors that C++ code cannot read from a wrapper.
COMPRESSED: Final = frozenset({torch.sparse_bsc, torch.sparse_bsr, torch.sparse_csc, torch.sparse_csr})
#: Name of what is not simulated: torch would end the process.
SPARSE_GRADIENT: Final = "the gradient of a compressed sparse tensor"


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
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:  # noqa: SLF001  # no public name
            return _run_in_parts(func, args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        device = operand_devices(func, args, kwargs, tag_of)[0]
        if kind_of(device) == "mps":
            refuse_on_mps(func, args, leaves)

        def computed(*given: Any, **named: Any) -> Any:
            with counting_saved(func, device):
                return compute(func, given, named, kind_of(device))

        return _WholeOp.apply(computed, spec, device, inner, place, *leaves)  # type: ignore[no-untyped-call]  # torch has no annotation

    return run


def _run_in_parts(func: OpOverload[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the parts of a composite operation: `torch.func` and forward-mode AD accept no `_WholeOp`.

    Raises:
        NotSimulated: if the operation has no parts.
    """
    results = func.decompose(*args, **kwargs)
    if results is NotImplemented:
        raise NotSimulated(f"{schema_of(func).name} in torch.func or forward-mode AD")
    return results


def run_compressed(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function of torch with compressed sparse tensors on the CPU.

    Args:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        NotSimulated: if the operands are on several devices.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    homes = {home_of(one) for one in tensors}
    if len(homes) > 1:
        raise NotSimulated(resolve_name(func) or str(func))
    # `apply` reads the layout of its tensors: a sparse one goes through it as another object.
    held = [
        leaf if not isinstance(leaf, torch.Tensor) or leaf.layout is torch.strided else _Held(leaf) for leaf in leaves
    ]

    def host(leaf: Any) -> Any:
        own = leaf.tensor if isinstance(leaf, _Held) else leaf
        return getattr(own, "host", own)

    def place(made: torch.Tensor, _device: torch.device) -> torch.Tensor:
        found: torch.Tensor = tensors[0].placed(made)
        return found

    return _WholeOp.apply(func, spec, homes.pop(), host, place, *held)  # type: ignore[no-untyped-call]  # torch has no annotation


class _Held(NamedTuple):
    """A tensor that `apply` must not see."""

    tensor: torch.Tensor


class _WholeOp(torch.autograd.Function):
    """A function as one autograd function, with the CPU's own backward."""

    @staticmethod
    def forward(ctx: Any, func: Any, spec: Any, device: Any, inner: Any, place: Any, *leaves: Any) -> Any:
        hosts = [inner(leaf) for leaf in leaves]
        needed = [at for at, wanted in enumerate(ctx.needs_input_grad[-len(leaves) :]) if wanted]
        for at in needed:
            hosts[at] = hosts[at].detach().requires_grad_()
        args, kwargs = pytree.tree_unflatten(hosts, spec)
        with torch.enable_grad():
            results = func(*args, **kwargs)
        ctx.needed, ctx.given, ctx.operands = needed, [hosts[at] for at in needed], [leaves[at] for at in needed]
        ctx.inner, ctx.place, ctx.leaves = inner, lambda made: place(made, device), len(leaves)
        ctx.made = results if isinstance(results, tuple) else (results,)
        return pytree.tree_map(lambda made: ctx.place(made.detach()), results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # `create_graph=True`
            found = _Gradient.apply(ctx, *ctx.operands, *grads)  # type: ignore[no-untyped-call]  # torch has no annotation
        else:
            keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001  # no public name for it
            given = [ctx.inner(grad) for grad in grads]
            hosts = torch.autograd.grad(ctx.made, ctx.given, given, retain_graph=keep, allow_unused=True)
            found = [None if host is None else ctx.place(host) for host in hosts]
        result: list[Any] = [None] * len(ctx.needs_input_grad)
        first = len(result) - ctx.leaves
        for at, gradient in zip(ctx.needed, found, strict=True):
            result[first + at] = gradient
        return tuple(result)


class _Gradient(torch.autograd.Function):
    """The backward of a `_WholeOp`, with a backward of its own: a function of the operands and the gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Any, *tensors: Any) -> Any:
        grads = [whole.inner(one).detach().requires_grad_() for one in tensors[len(whole.operands) :]]
        with torch.enable_grad():
            found = torch.autograd.grad(whole.made, whole.given, grads, create_graph=True, allow_unused=True)
        ctx.whole, ctx.given = whole, [*whole.given, *grads]
        ctx.made = [(at, one) for at, one in enumerate(found) if one is not None and one.requires_grad]
        return tuple(None if one is None else whole.place(one.detach()) for one in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        made = [one for _, one in ctx.made]
        given = [ctx.whole.inner(grads[at]) for at, _ in ctx.made]
        hosts = torch.autograd.grad(made, ctx.given, given, retain_graph=True, allow_unused=True)
        return None, *(None if host is None else ctx.whole.place(host) for host in hosts)
