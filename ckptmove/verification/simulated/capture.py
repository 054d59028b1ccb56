"""Refuse operations that a CUDA graph cannot hold while one is being captured, with torch's messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree

from ckptmove.verification.simulated.pinning import is_pinned
from ckptmove.verification.simulated.rules import COPIES, bound_arguments, schema_of
from ckptmove.verification.simulated.targets import home_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch._ops import OpOverload

#: Message of ``cudaErrorStreamCaptureUnsupported``.
_NOT_PERMITTED: Final = "CUDA error: operation not permitted when stream is capturing"
#: From ``copy_kernel_cuda`` in aten/src/ATen/native/cuda/Copy.cu.
_UNPINNED: Final = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. Please use "
    "tensor.pin_memory() or allocate the tensor with pin_memory=True."
)
#: Operations that read values of the device on the CPU. Some of them have a tag of torch.
_READING: Final = frozenset({"aten::_linalg_check_errors", "aten::allclose", "aten::equal"})
_TAGS: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
#: Operations that copy indices to the device, and read the values of a mask on the CPU.
_INDEXED: Final = frozenset({
    "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::index", "aten::index_put",
    "aten::index_put_",
})  # fmt: skip
_MASKS: Final = (torch.bool, torch.uint8)
#: The graph that is being captured, if any: torch allows one in a process.
OPEN: Final[list[Any]] = []
#: Errors that made the open capture invalid.
_REFUSALS: Final[list[BaseException]] = []


def is_capturing() -> bool:
    """Whether a graph is being captured."""
    return bool(OPEN)


def end() -> list[BaseException]:
    """Close the capture, and return the errors that made it invalid."""
    refusals = _REFUSALS.copy()
    _REFUSALS.clear()
    OPEN.clear()
    return refusals


def refuse_synchronization() -> None:
    """Raise torch's error for a call that waits for the device, which makes an open capture invalid."""
    if OPEN:
        _REFUSALS.append(torch.AcceleratorError(_NOT_PERMITTED))
        raise _REFUSALS[-1]


def refuse_copy(host: torch.Tensor | None, is_asynchronous: bool) -> None:
    """Raise torch's error for a copy between the CPU and a device.

    Args:
        host: the tensor on the CPU; None for a new one, which torch pins for an asynchronous copy.
        is_asynchronous: whether the copy is `non_blocking`.
    """
    if OPEN and not (is_asynchronous if host is None else is_pinned(host)):
        raise RuntimeError(_UNPINNED)
    if not is_asynchronous:
        refuse_synchronization()


def refuse_captured(func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise torch's error for an operation on a device that a graph cannot hold.

    Raises:
        RuntimeError: if it copies from or to CPU memory that is not pinned.
        torch.AcceleratorError: if it waits for the device.
    """
    if not OPEN:
        return
    named = {argument.name: value for argument, value in bound_arguments(func, args, kwargs)}
    tensors = (leaf for leaf in pytree.tree_leaves(named) if isinstance(leaf, torch.Tensor))
    on_cpu = [one for one in tensors if home_of(one).type == "cpu"]
    name = schema_of(func).name
    if name in COPIES and (on_cpu or str(named.get("device")) == "cpu"):
        refuse_copy(next(iter(on_cpu), None), bool(named.get("non_blocking")))
    elif name in _INDEXED and any(one.dim() for one in on_cpu):
        refuse_copy(next(one for one in on_cpu if one.dim()), is_asynchronous=False)
    elif (name in _READING | _INDEXED or _TAGS & {*func.tags}) and not _has_known_shape(named):
        refuse_synchronization()


def _has_known_shape(named: Mapping[str, Any]) -> bool:
    """Whether the shape of a result follows from an operation's arguments without the values of masks or counts."""
    if "indices" in named:
        masks = [one for one in named["indices"] if one is not None and one.dtype in _MASKS]
        values = named.get("values")  # torch writes a number by `masked_fill_`
        return not masks or (values is not None and values.numel() == 1)
    return named.get("output_size") is not None
