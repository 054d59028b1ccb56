"""Tensor subclasses that wrap other tensors, for example the moments of torchao's 8-bit and 4-bit optimizers.

A wrapper subclass has no storage of its own. Its inner tensors can be compared, copied or moved:
``__tensor_flatten__`` names them and ``__tensor_unflatten__`` rebuilds the wrapper (torch/utils/_python_dispatch.py).
Only ``torch.load(weights_only=True)`` builds wrappers from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from ckptmove.simulation.device import SimulatedTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ckptmove.model import TensorRecord
    from ckptmove.proof.restored.loaded import LoadedFiles
    from ckptmove.proof.tensors.pieces import TensorSource, Window


class WithWrappers:
    """A source of tensors that includes wrapper subclasses, as ``torch.load(weights_only=True)`` returned them."""

    def __init__(self, source: TensorSource, loaded: LoadedFiles) -> None:
        self._source = source
        self._loaded = loaded

    def tensor(self, record: TensorRecord, window: Window | None = None) -> torch.Tensor:
        """The tensor of a record, or a run of its elements; it must not be written to."""
        if record.kind != "wrapper-subclass":
            return self._source.tensor(record, window)
        wrapper = self._loaded.wrapper(record)
        return wrapper if window is None else window.cut(wrapper)


def is_wrapper(value: object) -> bool:
    """Whether a value is a wrapper subclass; a simulated tensor counts as plain."""
    return not isinstance(value, SimulatedTensor) and bool(is_traceable_wrapper_subclass(value))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor; for a wrapper subclass, also its inner tensors."""
    if not is_wrapper(tensor):
        return tensor.detach().clone()
    made: torch.Tensor = transform_subclass(tensor, lambda _name, inner: copied(inner))
    return made


def opened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each wrapper subclass in a flat state by its inner tensors (``exp_avg.codes``)."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if is_wrapper(value):
            inner, _ = value.__tensor_flatten__()
            found |= opened({f"{key}.{name}": getattr(value, name) for name in inner})
        else:
            found[key] = value
    return found
