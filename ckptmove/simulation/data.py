"""Move a tensor to another device in place, as `nn.Module.to` and `tensor.data = ...` do on a real device.

Other references to the tensor are allowed, as on a real device.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ckptmove.simulation.replaced import replaced
from ckptmove.simulation.targets import BACKEND, home_of, of_number, tag_of

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Attributes of the two kinds of tensors; other entries of their `__dict__` are the user's.
_OWN: Final = frozenset({"host", "_is_param", "simulated_index"})


@contextlib.contextmanager
def parameters_moved_in_place() -> Iterator[None]:
    """Let `nn.Module.to` take the number of a device, and parameters that have other references, in a context.

    From torch/nn/modules/module.py ``_apply``: it swaps tensors of different kinds, which torch.utils.swap_tensors
    refuses if a graph or a weak reference holds one. Back from a Python backend it would make new parameters.
    """
    module: Any = torch
    functions: Any = torch._C._nn  # as `nn.Module.to` calls it
    parse = functions._parse_to
    is_compatible = module._has_compatible_shallow_copy_type  # as `_apply` calls it

    # Any signature: torch/_dynamo/polyfills, which much of torch imports, compares it with its own.
    def compatible(*tensors: torch.Tensor, **_names: torch.Tensor) -> bool:
        there_and_back = [home_of(one).type for one in tensors] == [BACKEND, "cpu"]
        return there_and_back or bool(is_compatible(*tensors))

    def parsed(*args: Any, **kwargs: Any) -> Any:
        named = {name: of_number(one) if name == "device" else one for name, one in kwargs.items()}
        return parse(*map(of_number, args[:1]), *args[1:], **named)

    with (
        replaced(functions, _parse_to=parsed),
        replaced(torch.utils, swap_tensors=swap_tensors),
        replaced(torch, _has_compatible_shallow_copy_type=compatible),
    ):
        yield


def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap two tensors in place; hooks and user attributes of the first one stay on it.

    From torch/utils/__init__.py ``swap_tensors``, without its checks, and from torch/csrc/autograd/python_variable.cpp
    ``THPVariable_set_backwards_hooks``: setting hooks registers them.
    """
    kept = {name: value for name, value in one.__dict__.items() if name not in _OWN}
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__ | kept, one.__dict__
    torch._C._swap_tensor_impl(one, other)  # no other way
    for tensor in (one, other):
        hooks, later = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # no public names
        if hooks:
            tensor._backward_hooks = hooks  # no public name
        if later:
            tensor._post_accumulate_grad_hooks = later  # no public name


def become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a leaf the data of a tensor on another device, and move its gradient there.

    Raises:
        RuntimeError: if it is not a leaf, because its history would be lost.
    """
    if not tensor.is_leaf:
        raise RuntimeError(f"the data of an operation's result cannot be moved to {tag_of(value.device)} in place")
    gradient = tensor.grad
    tensor.grad = None
    if isinstance(tensor, nn.Parameter):
        made: torch.Tensor = nn.Parameter(value.data, requires_grad=tensor.requires_grad)
    else:
        made = value.data.requires_grad_(tensor.requires_grad)
    swap_tensors(tensor, made)
    if gradient is not None:
        become(gradient, gradient.to(value.device))
        tensor.grad = gradient
