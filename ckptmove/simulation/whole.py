"""Run functions of a simulated device as a whole on the CPU, with the CPU's backward.

These are composite operations, and functions of compressed sparse tensors, whose layout C++ code cannot read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

from ckptmove.simulation.errors import NotSimulated
from ckptmove.simulation.half_precision import compute
from ckptmove.simulation.mps import refuse_on_mps
from ckptmove.simulation.rules import bound_arguments, operand_devices, schema_of
from ckptmove.simulation.targets import home_of, kind_of, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

    from ckptmove.simulation.targets import Place

#: Layouts of tensors that C++ code cannot read from a wrapper.
COMPRESSED: Final = frozenset({torch.sparse_bsc, torch.sparse_bsr, torch.sparse_csc, torch.sparse_csr})
#: Name of what is not simulated: torch would end the process.
SPARSE_GRADIENT: Final = "the gradient of a compressed sparse tensor"
_RECURRENT: Final = (torch.ops.aten.gru, torch.ops.aten.lstm, torch.ops.aten.rnn_relu, torch.ops.aten.rnn_tanh)
#: From ``_cudnn_rnn_backward`` in aten/src/ATen/native/cudnn/RNN.cpp, and ``kCudnnDoubleBackwardMsg`` in
#: torch/csrc/autograd/FunctionsManual.h.
_NO_TRAINING: Final = "cudnn RNN backward can only be called in training mode"
_NO_DOUBLE_BACKWARD: Final = (
    "the derivative for '_cudnn_rnn_backward' is not implemented. Double backwards is not supported for CuDNN RNNs due "
    "to limitations in the CuDNN API. To run double backwards, please disable the CuDNN backend temporarily while "
    "running the forward pass of your RNN. For example: \nwith torch.backends.cudnn.flags(enabled=False):\n"
    "    output = model(inputs)"
)


def run_whole(
    func: OpOverload[..., Any],
    inner: Callable[[Any], Any],
    place: Place,
) -> Callable[..., Any]:
    """A function that runs a composite operation on the CPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:  # no public name
            results = func.decompose(*args, **kwargs)  # both accept no `_WholeOp`
            if results is NotImplemented:
                raise NotSimulated(f"{schema_of(func).name} in torch.func or forward-mode AD")
            return results
        leaves, spec = pytree.tree_flatten((args, kwargs))
        device = operand_devices(func, args, kwargs, tag_of)[0]
        if kind_of(device) == "mps":
            refuse_on_mps(func, args, kwargs, leaves)

        def computed(*given: Any, **named: Any) -> Any:
            return compute(func, given, named, kind_of(device))

        refusals = _refusals(func, args, kwargs, kind_of(device))
        return _WholeOp.apply(computed, spec, device, inner, place, refusals, *leaves)  # type: ignore[no-untyped-call]  # torch has no annotation

    return run


def run_compressed(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a function of torch with compressed sparse tensors on the CPU.

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

    return _WholeOp.apply(func, spec, homes.pop(), host, place, _Refusals(), *held)  # type: ignore[no-untyped-call]  # torch has no annotation


class _Refusals(NamedTuple):
    """torch's errors for the gradients of a function; empty where it has them."""

    backward: str = ""
    double_backward: str = ""


def _refusals(func: OpOverload[..., Any], args: Any, kwargs: Any, kind: str) -> _Refusals:
    """What cuDNN, which runs a recurrent function on cuda unless it is disabled, does not differentiate."""
    is_recurrent = func.overloadpacket in _RECURRENT
    if kind != "cuda" or not is_recurrent or not torch.backends.cudnn.enabled:
        return _Refusals()
    named = {argument.name: value for argument, value in bound_arguments(func, args, kwargs)}
    return _Refusals("" if named["train"] else _NO_TRAINING, _NO_DOUBLE_BACKWARD)


class _Held(NamedTuple):
    """A tensor that `apply` must not see."""

    tensor: torch.Tensor


class _WholeOp(torch.autograd.Function):
    """A function as one autograd function, with the CPU's own backward."""

    @staticmethod
    def forward(
        ctx: Any, func: Any, spec: Any, device: Any, inner: Any, place: Any, refusals: Any, *leaves: Any
    ) -> Any:
        needed = [at for at, wanted in enumerate(ctx.needs_input_grad[-len(leaves) :]) if wanted]
        ctx.needed, ctx.operands, ctx.leaves = needed, [leaves[at] for at in needed], len(leaves)
        ctx.inner, ctx.place, ctx.refusals = inner, lambda made: place(made, device), refusals
        ctx.host = _HostGraph(func, spec, needed)
        results = ctx.host.forward(*map(inner, leaves))
        return pytree.tree_map(ctx.place, results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.refusals.backward:
            raise RuntimeError(ctx.refusals.backward)
        if torch.is_grad_enabled():  # `create_graph=True`
            found = _Gradient.apply(ctx, *ctx.operands, *grads)  # type: ignore[no-untyped-call]  # torch has no annotation
        else:
            keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()
            hosts = ctx.host.backward(keep, *map(ctx.inner, grads))
            found = [None if host is None else ctx.place(host) for host in hosts]
        result: list[Any] = [None] * len(ctx.needs_input_grad)
        first = len(result) - ctx.leaves
        for at, gradient in zip(ctx.needed, found, strict=True):
            result[first + at] = gradient
        return tuple(result)


class _HostGraph:
    """The CPU's graph of a function."""

    def __init__(self, func: Callable[..., Any], spec: Any, needed: list[int]) -> None:
        self._func = func
        self._spec = spec
        self._needed = needed

    def forward(self, *leaves: Any) -> Any:
        """The results of the function, detached."""
        hosts = list(leaves)
        for at in self._needed:
            hosts[at] = hosts[at].detach().requires_grad_()
        args, kwargs = pytree.tree_unflatten(hosts, self._spec)
        with torch.enable_grad():
            results = self._func(*args, **kwargs)
        self.given = [hosts[at] for at in self._needed]  # the operands that need a gradient
        self.made = results if isinstance(results, tuple) else (results,)
        return pytree.tree_map(torch.Tensor.detach, results)

    def backward(self, keep: bool, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the operands for those of the results."""
        return torch.autograd.grad(self.made, self.given, grads, retain_graph=keep, allow_unused=True)


class _Gradient(torch.autograd.Function):
    """The backward of a `_WholeOp`, with a backward of its own: a function of the operands and the gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Any, *tensors: Any) -> Any:
        ctx.whole, ctx.host = whole, _HostGradient(whole.host)
        found = ctx.host.forward(*map(whole.inner, tensors[len(whole.operands) :]))
        return tuple(None if one is None else whole.place(one) for one in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.whole.refusals.double_backward:
            raise NotImplementedError(ctx.whole.refusals.double_backward)
        hosts = ctx.host.backward(*map(ctx.whole.inner, grads))
        return None, *(None if host is None else ctx.whole.place(host) for host in hosts)


class _HostGradient:
    """The CPU's graph of a backward."""

    def __init__(self, host: _HostGraph) -> None:
        self._host = host

    def forward(self, *leaves: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the operands for those of the results, detached."""
        grads = [leaf.detach().requires_grad_() for leaf in leaves]
        given = self._host.given
        with torch.enable_grad():
            made = torch.autograd.grad(self._host.made, given, grads, create_graph=True, allow_unused=True)
        found: tuple[torch.Tensor | None, ...] = made
        self._given = [*given, *grads]
        self._made = {at: one for at, one in enumerate(found) if one is not None and one.requires_grad}
        return tuple(None if one is None else one.detach() for one in found)

    def backward(self, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the operands, and of the gradients of the results."""
        given = [grads[at] for at in self._made]
        return torch.autograd.grad([*self._made.values()], self._given, given, retain_graph=True, allow_unused=True)
