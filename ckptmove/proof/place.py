"""Choose the device of the step: the CPU, an accelerator of this machine, or a simulated one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from ckptmove.simulation.device import SimulatedDevice, unavailable_reason

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class StepDevice(Protocol):
    """A device to make a step on."""

    device: torch.device  # in this process

    def active(self) -> AbstractContextManager[object]:
        """Context in which tensors are made on the device and moved to it; required for a simulated device."""
        ...

    def to_device(self, tensor: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
        """A CPU tensor on the device. Without `copy`, it may share the memory of `tensor`."""
        ...

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values on the CPU."""
        ...

    def device_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor is, as torch would print it on the target's machine."""
        ...


class TorchDevice:
    """A device that torch has on this machine."""

    def __init__(self, tag: str) -> None:
        self.device = torch.device(tag)

    def active(self) -> AbstractContextManager[object]:
        """A context without effect."""
        return contextlib.nullcontext()

    def to_device(self, tensor: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
        """A CPU tensor on the device. Without `copy`, it may share the memory of `tensor`."""
        return tensor.detach().to(self.device, copy=copy)

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values on the CPU."""
        return tensor.detach().cpu()

    def device_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor is."""
        return str(tensor.device)


class Site(NamedTuple):
    """Target and device mode of one verification."""

    target: str  # device tag of the target
    mode: Literal["real", "simulated", "cpu"]  # kind of device that is used for the target
    reason: str = ""  # why no step can be made; empty if it can

    @property
    def label(self) -> str:
        """The target's tag, marked if it is simulated."""
        return self.target + " (simulated)" * (self.mode == "simulated")

    @property
    def missing(self) -> str:
        """Why no step can be made, as a sentence with the target."""
        return f"there is no {self.target} here, and it cannot be simulated: {self.reason}"

    def place(self) -> StepDevice:
        """The device to make the step on."""
        return SimulatedDevice(self.target) if self.mode == "simulated" else TorchDevice(self.target)


def find_site(target: str) -> Site:
    """Find a device for the target on this machine, or simulate it."""
    if target.partition(":")[0] == "cpu":
        return Site(target, "cpu")
    if is_here(target):
        return Site(target, "real")
    return Site(target, "simulated", unavailable_reason() or "")


def is_here(target: str) -> bool:
    """Whether this machine has the accelerator, with this index."""
    kind, _, index = target.partition(":")
    module: Any = getattr(torch, kind, None)
    # The oldest supported torch has no `torch.mps.is_available`.
    available = torch.backends.mps.is_available if kind == "mps" else getattr(module, "is_available", None)
    return bool(available is not None and available() and int(index or 0) < module.device_count())
