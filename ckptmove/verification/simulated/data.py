"""A tensor that becomes another one in place, as `nn.Module.to` and `tensor.data = ...` have it on a real device.

Never asks who else holds the tensor: on a real device nobody has to let go of it either.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ckptmove.verification.simulated.targets import BACKEND, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What the two kinds of tensors keep in their own dictionary; all else there is the user's.
_OWN: Final = frozenset({"host", "_is_param"})


@contextlib.contextmanager
def replaced_in_place() -> Iterator[None]:
    """Have `nn.Module.to` change parameters that are held elsewhere, too, as long as the context is open.

    From torch/nn/modules/module.py ``_apply``: between kinds of tensors it swaps them, which torch.utils.swap_tensors
    refuses where a graph or a weak reference holds one, and back from a Python backend it would make new ones.
    """
    module: Any = torch
    swap, is_compatible = module.utils.swap_tensors, module._has_compatible_shallow_copy_type  # noqa: SLF001  # as `_apply` asks it

    # Of any signature: torch/_dynamo/polyfills, which much of torch imports, holds it against one of its own.
    def compatible(*tensors: torch.Tensor, **_names: torch.Tensor) -> bool:
        there_and_back = [one.device.type for one in tensors] == [BACKEND, "cpu"]
        return there_and_back or bool(is_compatible(*tensors))

    module.utils.swap_tensors = exchange
    module._has_compatible_shallow_copy_type = compatible  # noqa: SLF001  # while the device stands
    try:
        yield
    finally:
        module.utils.swap_tensors = swap
        module._has_compatible_shallow_copy_type = is_compatible  # noqa: SLF001  # the function, put back


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap all that two tensors are; hooks and what a user has set on the first of them stay.

    From torch/utils/__init__.py ``swap_tensors``, less its refusals, and from torch/csrc/autograd/python_variable.cpp
    ``THPVariable_set_backwards_hooks``: to set hooks registers them.
    """
    kept = {name: value for name, value in one.__dict__.items() if name not in _OWN}
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__ | kept, one.__dict__
    torch._C._swap_tensor_impl(one, other)  # noqa: SLF001  # the one way
    for tensor in (one, other):
        hooks, later = tensor._backward_hooks, tensor._post_accumulate_grad_hooks  # noqa: SLF001  # no public names
        if hooks:
            tensor._backward_hooks = hooks  # noqa: SLF001  # no public name
        if later:
            tensor._post_accumulate_grad_hooks = later  # noqa: SLF001  # no public name


def become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a leaf the data of a tensor on another device, and move its gradient there.

    Args:
        tensor: the leaf.
        value: what it is to hold, and to share the memory of.

    Raises:
        RuntimeError: it is no leaf: what made it would be forgotten.
    """
    if not tensor.is_leaf:
        raise RuntimeError(f"the data of what an operation made cannot go to {name_of(value.device)} in place")
    gradient = tensor.grad
    tensor.grad = None
    if isinstance(tensor, nn.Parameter):
        made: torch.Tensor = nn.Parameter(value.data, requires_grad=tensor.requires_grad)
    else:
        made = value.data.requires_grad_(tensor.requires_grad)
    exchange(tensor, made)
    if gradient is not None:
        become(gradient, gradient.to(value.device))
        tensor.grad = gradient
