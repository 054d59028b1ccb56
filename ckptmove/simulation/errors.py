"""Errors of a simulated device, with torch's messages. The last base of each class is the class that torch raises."""

from __future__ import annotations

import linecache
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ckptmove.simulation.scripted import missing_attribute

if TYPE_CHECKING:
    import torch


_RAISE: Final = re.compile(r"\braise\b")
#: Messages of torch, and of C++ extensions that check the device (`CHECK_CUDA` of torch's tutorial): an operation
#: without a kernel, a dtype that only the CPU lacks, a tensor whose memory or layout is read in C++, an
#: allocation that this machine has no memory for, and a function that a torch without CUDA or MPS lacks.
_MESSAGES: Final = tuple(
    re.compile(message)
    for message in (
        r"Could not run '([^']+)' with arguments from the '\w+' backend",
        r'"(\w*_cpu\w*)" not implemented for \'\w+\'',
        r"(?:Unsupported dtype|MKL FFT doesn't support tensors of type:) Half",
        r"Cannot access (?:data pointer|storage) of Tensor",
        r"layout_impl is only implemented for TensorImpl subclasses",
        r"must be a CUDA tensor",
        r"PyTorch is not linked with support for cuda devices",
        r"(DefaultCPUAllocator: can't allocate memory)",
        r"module 'torch\._C' has no attribute '(\w+)'",
        r"Cannot execute (\w+)\(\) without MPS backend",
    )
)


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


class NotSimulated(NotImplementedError):
    """A call that a simulated device does not support.

    Attributes:
        operation: name of the function.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} is not supported by the simulation")
        self.operation = operation


def refused(operation: str) -> Any:
    """A class that raises NotSimulated when it is called, to replace a function or class of torch."""

    class Unavailable:  # no function: annotations may combine it with `|`
        def __new__(cls, *_args: object, **_more: object) -> NoReturn:
            raise NotSimulated(operation)

    return Unavailable


def unsupported_operation(error: BaseException) -> str | None:
    """Name of the operation if an exception shows a limit of the simulation, or empty if unknown; else None."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, NotSimulated):
        cause = cause.__cause__  # as torch.onnx.export raises its own error from that of torch.export
    if cause is not None:
        return cause.operation
    if isinstance(error, AttributeError) and (missing := missing_attribute(error)):
        return missing
    found = next(filter(None, (message.search(str(error)) for message in _MESSAGES)), None)
    if found is None or not isinstance(error, (RuntimeError, AttributeError)) or _is_raised_in_python(error):
        return None
    return next(iter(found.groups()), "")


def _is_raised_in_python(error: BaseException) -> bool:
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    source = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return _RAISE.search(source) is not None
