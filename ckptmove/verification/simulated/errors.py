"""Errors of a simulated device, with torch's messages. The last base of each class is the class that torch raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class RefusedOperation(Exception):
    """An operation that the target refuses.

    Attributes:
        operation: the ATen operation, for example `aten::addmm`.
        node: in a backward that torch computes, the node of the graph (`MulBackward0`); else empty.
        made_by: file and line of each frame that made the node, innermost last, if anomaly detection was on.
    """

    def __init__(self, operation: str, message: str) -> None:
        super().__init__(message)
        self.operation = operation
        self.node = ""
        self.made_by: tuple[tuple[str, int], ...] = ()


class CrossDeviceError(RefusedOperation, RuntimeError):
    """An operation got tensors of two devices; the message is torch's own, with the target's name.

    Attributes:
        devices: the devices, accelerators first, for example `("cuda:0", "cpu")`.
        strays: the operands that are not on the first of `devices`, as the operation got them: for a view
            (`weight.t()`), `_base` is the tensor that the model holds.
    """

    def __init__(self, operation: str, devices: tuple[str, ...], strays: tuple[torch.Tensor, ...]) -> None:
        super().__init__(
            operation,
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{devices[0]} and {devices[1]}!",
        )
        self.devices = devices
        self.strays = strays


class WrongGradient(CrossDeviceError):
    """A user's autograd function returned a gradient on another device than its input; the message is torch's own.

    Attributes:
        function: the user's class.
        index: index of the gradient among those of tensors.
        argument: name of the first gradient argument of its `backward`; empty if it has no name.
        home: file and first line of that `backward`; None if it is not a function.
    """

    def __init__(self, node: str, index: int, devices: tuple[str, str], gradient: torch.Tensor, function: str) -> None:
        super().__init__(node, devices, (gradient,))
        wanted = f"expected device {devices[0]} but got {devices[1]}"
        self.args = (f"Function {node} returned an invalid gradient at index {index} - {wanted}",)
        self.function = function
        self.index = index
        self.argument = ""
        self.home: tuple[str, int] | None = None


class RefusedOnMps(RefusedOperation, RuntimeError):
    """An operation that the MPS backend refuses."""


class MissingOnMps(RefusedOnMps, NotImplementedError):
    """An operation, or a shape of its operands, that the MPS backend does not implement."""
