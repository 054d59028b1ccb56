"""What is raised while the autograd engine runs on a simulated device, brought out of it whole.

Never holds the engine up: what is raised ends a backward, as on a real device.

For a device of Python's the engine restores a stream on the way out, which asks :class:`Guard` for its type: a call of
Python while an exception is on its way would end the process, as that is no place for one. So the guard takes the
exception up, and the engine's caller raises it.
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

from ckptmove.verification.simulated.rules import CrossDeviceError, WrongGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_ENGINE: Final = graph._engine_run_backward.__code__  # noqa: SLF001  # the one function that runs the engine
_OWN: Final = re.compile(
    r"[\\/]ckptmove[\\/]verification[\\/](simulated[\\/]device|case[\\/]backward)\.py$|[\\/]torch[\\/]_(compile|dynamo[\\/].*)\.py$"
)
#: A line of `traceback.format_stack`, as anomaly detection keeps it.
_FRAME: Final = re.compile(r'\s*File "(.*)", line (\d+), in ')

#: `inspect.CO_VARARGS`: of the code of a function that takes any number of arguments.
_TAKES_MORE: Final = 0x04


class _Runs(threading.local):
    """What was taken up in each run of the engine in a thread, the innermost last: one may run inside of another."""

    def __init__(self) -> None:
        self.open: list[list[BaseException]] = []


_RUNS: Final = _Runs()


def is_running() -> bool:
    """Whether the engine runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001  # no public name for it


def note_node(error: CrossDeviceError) -> None:
    """Take down the node of the graph that an operation was refused in, where no code of Python's stands between."""
    frames = _frames_to_engine(sys._getframe(1))  # noqa: SLF001  # the frames, without an exception that left them
    is_torchs = all(_OWN.search(frame.f_code.co_filename) for frame in frames)
    node: Any = torch._C._current_autograd_node()  # noqa: SLF001  # no public name for it
    if is_torchs and node is not None:
        error.node = node.name()
        stack = (_FRAME.match(line) for line in node.metadata.get("traceback_", ()))
        error.made_by = tuple((found[1], int(found[2])) for found in stack if found is not None)


def _frames_to_engine(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code is not _ENGINE:
        yield frame
        frame = frame.f_back


def make_guard(kind: Any) -> Any:
    """The guard of a device of Python's, to be kept as long as the process lives.

    Args:
        kind: what it says that it guards.
    """

    class Guard(torch._C._acc.DeviceGuard):  # noqa: SLF001  # not in every torch
        def type_(self) -> Any:
            try:
                # CPython's conversion of an index gives -1 where it fails: only then it looks for an exception, and
                # takes the one that is on its way for its own.
                "".zfill(-1)
            except BaseException as error:  # noqa: BLE001  # whatever was raised, the engine's caller raises it again
                if _RUNS.open:
                    _RUNS.open[-1].append(error)
            return kind

    return Guard()


@contextlib.contextmanager
def as_on_a_real_device(name_of: Callable[[torch.device], str]) -> Iterator[None]:
    """Have what hooks raise and gradients treated as on a real device, as long as the context is open.

    Args:
        name_of: what the target calls a device.
    """
    with _raised_by_its_caller(name_of), _gradients_checked(name_of):
        yield


@contextlib.contextmanager
def _gradients_checked(name_of: Callable[[torch.device], str]) -> Iterator[None]:
    """Make torch's own check of what a user's function returns in `backward`: it leaves tensors of subclasses out.

    From torch/csrc/autograd/input_metadata.cpp: a gradient has to be where the input is, and one of no dimension is
    moved there.

    Args:
        name_of: what the target calls a device.
    """
    apply = BackwardCFunction.apply

    def checked(node: Any, *grads: Any) -> Any:
        returned = apply(node, *grads)  # type: ignore[no-untyped-call]  # torch leaves it so
        found = list(returned) if isinstance(returned, tuple) else [returned]
        wanted = [place for place, needed in enumerate(node.needs_input_grad) if needed]
        edges = [(index, *edge) for index, edge in enumerate(node.next_functions) if edge[0] is not None]
        for place, (index, following, number) in zip(wanted, edges, strict=False):
            device = following._input_metadata[number].device  # noqa: SLF001  # no public name for it
            if place >= len(found) or not isinstance(found[place], torch.Tensor) or found[place].device == device:
                continue
            if found[place].dim():
                devices = name_of(device), name_of(found[place].device)
                raise _wrong(node, index, devices, found[place])
            found[place] = found[place].to(device)
        return tuple(found) if isinstance(returned, tuple) else found[0]

    BackwardCFunction.apply = checked  # type: ignore[method-assign]  # another takes its place while the device stands
    try:
        yield
    finally:
        BackwardCFunction.apply = apply  # type: ignore[method-assign]  # the method, put back


def _wrong(node: Any, index: int, devices: tuple[str, str], gradient: torch.Tensor) -> WrongGradient:
    function = node._forward_cls  # noqa: SLF001  # no public name for the user's class
    error = WrongGradient(node.name(), index, devices, gradient, function.__name__)
    backward = getattr(function.backward, "__wrapped__", function.backward)  # by `once_differentiable`
    code = getattr(backward, "__code__", None)
    if code is not None:
        error.home = code.co_filename, code.co_firstlineno
        error.argument = _first_gradient(code)
    return error


def _first_gradient(code: Any) -> str:
    """What a `backward` calls the first gradient that it is given: `grad`, or `grads[0]` of a `*grads`."""
    if code.co_argcount > 1:
        return str(code.co_varnames[1])
    takes_more = code.co_flags & _TAKES_MORE
    return f"{code.co_varnames[code.co_argcount + code.co_kwonlyargcount]}[0]" if takes_more else ""


@contextlib.contextmanager
def _raised_by_its_caller(name_of: Callable[[torch.device], str]) -> Iterator[None]:
    """Have the engine raise at its end what was taken up while it ran, as long as the context is open.

    Args:
        name_of: what the target calls a device.
    """
    module: Any = torch.autograd
    engine = module._engine_run_backward  # noqa: SLF001  # as `torch.autograd.backward` and `grad` call it

    def run(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = _where_they_belong(outputs, gradients, name_of)
        taken: list[BaseException] = []
        _RUNS.open.append(taken)
        try:
            result = engine(outputs, gradients, *args, **kwargs)
        except SystemError:  # it has failed, and there is no exception any more
            if not taken:
                raise
        finally:
            _RUNS.open.pop()
        if taken:
            raise taken[0]
        return result

    module._engine_run_backward = run  # noqa: SLF001  # another takes its place while the device stands
    try:
        yield
    finally:
        module._engine_run_backward = engine  # noqa: SLF001  # the engine, put back


def _where_they_belong(outputs: Any, gradients: Any, name_of: Callable[[torch.device], str]) -> tuple[Any, ...]:
    """The gradients that a backward begins with: torch's own check leaves tensors of subclasses out, again.

    Raises:
        CrossDeviceError: one is not where its output is.
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
