"""Pinned memory of a simulated device: plain memory that reports itself as pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ckptmove.simulation import targets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: From ``empty_cuda`` in aten/src/ATen/native/cuda/TensorFactories.cu.
_ONLY: Final = "Only dense CPU tensors can be pinned"
#: Pinned storages. A weak reference to a storage keeps its address from being reused.
_PINNED: Final[set[Any]] = set()


def is_pinned(tensor: torch.Tensor, *_device: object) -> bool:
    """Whether a CPU tensor or the base of a view was pinned."""
    return _weak(tensor) in _PINNED


def pin(tensor: torch.Tensor, *_device: object) -> torch.Tensor:
    """A copy of a CPU tensor that reports itself as pinned."""
    return _pinned(torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu").copy_(tensor))


def made_pinned(make: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Run a factory function with ``pin_memory=True``."""
    made = make(*args, **{**kwargs, "pin_memory": False})
    if made.device.type != "cpu":
        raise RuntimeError(_ONLY)
    return _pinned(made)


def refuse_pinning(operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise torch's error for an operation that pins memory of a device.

    From aten/src/ATen/native/Memory.cpp ``_pin_memory``.
    """
    if operation == "aten::_pin_memory":
        kind = args[0].type().rpartition(".")[2]
        name = f"torch.{targets.kind_of(targets.home_of(args[0]))}.{kind}"
        raise RuntimeError(f"cannot pin '{name}' only dense CPU tensors can be pinned")
    if kwargs.get("pin_memory"):
        raise RuntimeError(_ONLY)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    _PINNED.difference_update({known for known in _PINNED.copy() if known.expired()})  # a copy: loaders use threads
    _PINNED.add(_weak(tensor))
    return tensor


def _weak(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())
