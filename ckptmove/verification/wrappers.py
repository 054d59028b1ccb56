"""Tensor subclasses that wrap other tensors, as torchao's 8-bit and 4-bit optimizers keep their moments.

Never builds one from a file's own bytes: ``torch.load(weights_only=True)`` does.

Such a subclass has no storage of its own. What can be compared, copied or moved are the tensors inside of it, which
``__tensor_flatten__`` names and ``__tensor_unflatten__`` takes back (torch/utils/_python_dispatch.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from ckptmove.verification.simulated.device import SimulatedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ckptmove.model import TensorRecord
    from ckptmove.verification.loaded import LoadedFiles
    from ckptmove.verification.pieces import TensorSource


class WithWrappers:
    """A source of tensors that also gives wrapper subclasses, as ``torch.load(weights_only=True)`` returned them."""

    def __init__(self, source: TensorSource, loaded: LoadedFiles) -> None:
        self._source = source
        self._loaded = loaded

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """The tensor of a record; it must not be written to.

        Raises:
            NoWrapper: ``torch.load`` returned no such wrapper subclass.
        """
        return self._loaded.wrapper(record) if record.kind == "wrapper-subclass" else self._source.tensor(record)


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor with others inside in place of a storage; a simulated tensor counts as plain."""
    return not isinstance(value, SimulatedTensor) and bool(is_traceable_wrapper_subclass(value))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor; of a wrapper subclass, the same class around copies of the tensors inside."""
    if not is_wrapper(tensor):
        return tensor.detach().clone()
    made: torch.Tensor = transform_subclass(tensor, lambda _name, inner: copied(inner))  # type: ignore[no-untyped-call]
    return made


def opened(state: Mapping[str, Any]) -> dict[str, Any]:
    """A flat state with each wrapper subclass replaced by the tensors inside of it: ``exp_avg.codes``."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if is_wrapper(value):
            inner, _ = value.__tensor_flatten__()
            found |= opened({f"{key}.{name}": getattr(value, name) for name in inner})
        else:
            found[key] = value
    return found
