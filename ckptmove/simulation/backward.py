"""Raise errors of the autograd engine on a simulated device in the code that called the engine.

For a device written in Python the engine restores a stream on the way out, which asks :class:`Guard` for its type. A
call of Python while a C++ exception unwinds would end the process. So the guard keeps the exception, and the code that
called the engine raises it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction

from ckptmove.simulation.errors import CrossDeviceError, WrongGradient
from ckptmove.simulation.identity import TargetDevices
from ckptmove.simulation.replaced import replaced
from ckptmove.simulation.targets import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from ckptmove.simulation.errors import RefusedOperation

#: The one function that runs the engine.
ENGINE: Final = graph._engine_run_backward.__code__
_OWN: Final = re.compile(
    r"[\\/]ckptmove[\\/]simulation[\\/](device|identity|backward)\.py$|[\\/]torch[\\/]_(compile|dynamo[\\/].*)\.py$"
)
#: A line of `traceback.format_stack`, as anomaly detection keeps it.
_FRAME: Final = re.compile(r'\s*File "(.*)", line (\d+), in ')

#: `inspect.CO_VARARGS`: of the code of a function that takes any number of arguments.
_TAKES_MORE: Final = 0x04


class _Runs(threading.local):
    """Exceptions kept in each run of the engine in a thread, the innermost last: runs may nest."""

    def __init__(self) -> None:
        self.open: list[list[BaseException]] = []


_RUNS: Final = _Runs()


def is_running() -> bool:
    """Whether the engine runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def note_node(error: RefusedOperation) -> None:
    """Note the graph node of a refused operation, unless Python code of a hook or a function called it."""
    frames = _frames_to_engine(sys._getframe(1))  # the frames, without an exception that left them
    is_torchs = all(_OWN.search(frame.f_code.co_filename) for frame in frames)
    node: Any = torch._C._current_autograd_node()
    if is_torchs and node is not None:
        error.node = node.name()
        error.made_by = frames_of(node.metadata.get("traceback_", ()))


def frames_of(stack: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """File and line of each frame in the lines of `traceback.format_stack`, without this package's own."""
    lines = map(_FRAME.match, stack)
    return tuple((found[1], int(found[2])) for found in lines if found is not None and not _OWN.search(found[1]))


def _frames_to_engine(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code is not ENGINE:
        yield frame
        frame = frame.f_back


def make_guard(kind: Any) -> Any:
    """Device guard of a device written in Python. Keep it as long as the process lives."""

    class Guard(torch._C._acc.DeviceGuard):  # not in every torch
        def type_(self) -> Any:
            try:
                # CPython looks for an exception only if the conversion of an index returned -1, and then takes the
                # pending one for its own.
                "".zfill(-1)
            except BaseException as error:  # noqa: BLE001  # of any class: the engine's caller raises it again
                if _RUNS.open:
                    _RUNS.open[-1].append(error)
            return kind

    return Guard()


@contextlib.contextmanager
def as_on_a_real_device(name_of: Callable[[torch.device], str]) -> Iterator[None]:
    """Treat exceptions of hooks, and gradients, as on a real device."""
    with _reraised(name_of), _gradients_checked(name_of):
        yield


@contextlib.contextmanager
def _gradients_checked(name_of: Callable[[torch.device], str]) -> Iterator[None]:
    """Check the gradients that a user's `backward` returns: torch's own check skips tensors of subclasses.

    From torch/csrc/autograd/input_metadata.cpp: a gradient must be on the device of the input. A zero-dimensional one
    is moved there.
    """
    apply = BackwardCFunction.apply

    def checked(node: Any, *grads: Any) -> Any:
        returned = apply(node, *grads)  # type: ignore[no-untyped-call]  # torch has no annotation
        found = list(returned) if isinstance(returned, tuple) else [returned]
        wanted = [place for place, needed in enumerate(node.needs_input_grad) if needed]
        edges = [(index, *edge) for index, edge in enumerate(node.next_functions) if edge[0] is not None]
        for place, (index, following, number) in zip(wanted, edges, strict=False):
            device = shown(following._input_metadata[number].device)
            if (
                place >= len(found)
                or not isinstance(found[place], torch.Tensor)
                or shown(found[place].device) == device
            ):
                continue
            if found[place].dim():
                devices = name_of(device), name_of(found[place].device)
                raise _wrong(node, index, devices, found[place])
            found[place] = found[place].to(device)
        return tuple(found) if isinstance(returned, tuple) else found[0]

    with replaced(BackwardCFunction, apply=checked):
        yield


def _wrong(node: Any, index: int, devices: tuple[str, str], gradient: torch.Tensor) -> WrongGradient:
    function = node._forward_cls  # no public name for the user's class
    error = WrongGradient(node.name(), index, devices, gradient, function.__name__)
    backward = getattr(function.backward, "__wrapped__", function.backward)  # by `once_differentiable`
    code = getattr(backward, "__code__", None)
    if code is not None:
        error.home = code.co_filename, code.co_firstlineno
        error.argument = _first_gradient(code)
    return error


def _first_gradient(code: Any) -> str:
    """Expression of a `backward` for its first gradient: `grad`, or `grads[0]` for `*grads`."""
    if code.co_argcount > 1:
        return str(code.co_varnames[1])
    takes_more = code.co_flags & _TAKES_MORE
    return f"{code.co_varnames[code.co_argcount + code.co_kwonlyargcount]}[0]" if takes_more else ""


@contextlib.contextmanager
def _reraised(name_of: Callable[[torch.device], str]) -> Iterator[None]:
    """Raise the exceptions that the guard kept when the engine returns."""
    module: Any = torch.autograd
    engine = module._engine_run_backward  # as `torch.autograd.backward` and `grad` call it

    def run(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = _checked_gradients(outputs, gradients, name_of)
        kept: list[BaseException] = []
        _RUNS.open.append(kept)
        try:
            with TargetDevices():  # the mode is off in `Tensor.backward`
                result = engine(outputs, gradients, *args, **kwargs)
        except SystemError:  # the engine failed, and the guard has the exception
            if not kept:
                raise
        finally:
            _RUNS.open.pop()
        if kept:
            # In no variable of this frame: the exception refers to it, and would keep the tensors of the step alive.
            del kept[1:]
            raise kept.pop()
        return result

    with replaced(module, _engine_run_backward=run):
        yield


def _checked_gradients(outputs: Any, gradients: Any, name_of: Callable[[torch.device], str]) -> tuple[Any, ...]:
    """The gradients that a backward starts with, moved if zero-dimensional: torch's own check skips subclasses.

    Raises:
        CrossDeviceError: if one is not on the device of its output.
    """
    moved = list(gradients)
    for index, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        is_tensor = isinstance(output, torch.Tensor) and isinstance(gradient, torch.Tensor)
        if is_tensor and gradient.device != output.device:
            if gradient.dim():
                devices = name_of(output.device), name_of(gradient.device)
                error = CrossDeviceError("validate_outputs", devices, (gradient,))
                error.args = (f"invalid gradient at index {index} - expected device {devices[0]} but got {devices[1]}",)
                raise error
            moved[index] = gradient.to(output.device)
    return tuple(moved)
