"""Where the step is made: the CPU, the accelerator of this machine, or a simulated one.

Never says that a simulated device is real.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from ckptmove.verification.simulated.device import SimulatedDevice, unavailable_reason

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Place(Protocol):
    """A device that a step can be made on.

    Attributes:
        device: what torch knows it by in this process.
    """

    device: torch.device

    def standing(self) -> AbstractContextManager[object]:
        """The time in which tensors are made and moved on the device: a simulated one is only there for it."""
        ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a CPU tensor on the device."""
        ...

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values on the CPU."""
        ...

    def device_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor is, as torch would print it on the target's machine."""
        ...


class TorchDevice:
    """A device that torch has here.

    Attributes:
        device: the device.
    """

    def __init__(self, tag: str) -> None:
        self.device = torch.device(tag)

    def standing(self) -> AbstractContextManager[object]:
        """Always."""
        return contextlib.nullcontext()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a CPU tensor on the device."""
        return tensor.detach().to(self.device, copy=True)

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values on the CPU."""
        return tensor.detach().cpu()

    def device_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor is."""
        return str(tensor.device)


class Site(NamedTuple):
    """The place of one verification.

    Attributes:
        target: tag of the target.
        mode: what stands for it.
        reason: why there is nothing to step on; empty where there is.
    """

    target: str
    mode: Literal["real", "simulated", "cpu"]
    reason: str = ""

    def place(self) -> Place:
        """The place itself."""
        return SimulatedDevice(self.target) if self.mode == "simulated" else TorchDevice(self.target)


def find_site(target: str) -> Site:
    """What can stand for a target on this machine."""
    if target.partition(":")[0] == "cpu":
        return Site(target, "cpu")
    if is_here(target):
        return Site(target, "real")
    return Site(target, "simulated", unavailable_reason() or "")


def is_here(target: str) -> bool:
    """Whether torch has this accelerator here, with this index."""
    kind, _, index = target.partition(":")
    module: Any = getattr(torch, kind, None)
    # `torch.mps.is_available` is younger than the oldest torch that is supported.
    available = torch.backends.mps.is_available if kind == "mps" else getattr(module, "is_available", None)
    return bool(available is not None and available() and int(index or 0) < module.device_count())
