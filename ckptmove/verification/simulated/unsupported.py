"""Recognize errors of operations that a real device supports and the simulation does not."""

from __future__ import annotations

import linecache
import re
from typing import Any, Final, NoReturn

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


class NotSimulated(NotImplementedError):
    """A call that a simulated device does not support.

    Attributes:
        operation: name of the function.
    """

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} is not supported by the simulation")
        self.operation = operation


def refused(operation: str) -> Any:
    """A class that raises NotSimulated when it is called, to replace a function or class of torch.

    Args:
        operation: name of the function or class.
    """

    class Unavailable:  # no function: annotations may combine it with `|`
        def __new__(cls, *_args: object, **_more: object) -> NoReturn:
            raise NotSimulated(operation)

    return Unavailable


def unsupported_operation(error: BaseException) -> str | None:
    """Name of the operation if an exception shows a limit of the simulation, or empty if unknown; else None."""
    if isinstance(error, NotSimulated):
        return error.operation
    found = next(filter(None, (message.search(str(error)) for message in _MESSAGES)), None)
    if found is None or not isinstance(error, (RuntimeError, AttributeError)) or _is_raised_in_python(error):
        return None
    return next(iter(found.groups()), "")


def _is_raised_in_python(error: BaseException) -> bool:
    """Whether a statement raised an exception, and not a call of C++."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    source = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return _RAISE.search(source) is not None
