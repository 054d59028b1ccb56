"""What a simulated device refuses while the autograd engine runs, kept until it has ended.

Never lets an exception of an operation out through the engine.

There it would end the process: for a device of Python's, `torch::acc::PythonDeviceGuard::exchangeStream` calls Python
while the exception is on its way, and is noexcept. So the step goes on with a value in place of the refused one, and
the first refusal is raised when the engine returns. So it is with an exception of a hook of the user's. What a function
of the user's own raises in `backward` does no such harm.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.autograd import graph
from torch.autograd.function import BackwardCFunction

from ckptmove.verification.simulated_rules import CrossDeviceError, WrongGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

#: What an operation raises.
ERRORS: Final = (RuntimeError, TypeError, ValueError, IndexError)
_ENGINE: Final = graph._engine_run_backward.__code__  # noqa: SLF001  # the one function that runs the engine
_OWN: Final = re.compile(r"/ckptmove/verification/(simulated|backward)\.py$|/torch/_(compile|dynamo/.*)\.py$")
#: A line of `traceback.format_stack`, as anomaly detection keeps it.
_FRAME: Final = re.compile(r'\s*File "(.*)", line (\d+), in ')

#: What a user registers hooks with that run in `backward`.
_REGISTRARS: Final = (
    (torch.Tensor, torch.Tensor.register_hook),
    (torch.Tensor, torch.Tensor.register_post_accumulate_grad_hook),
    (nn.Module, nn.Module.register_backward_hook),
    (nn.Module, nn.Module.register_full_backward_hook),
    (nn.Module, nn.Module.register_full_backward_pre_hook),
)

_kept: list[Exception] = []


def is_running() -> bool:
    """Whether the engine runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001  # no public name for it


def keep(error: Exception) -> None:
    """Keep what was raised, with the frames between the engine and the operation: those of a hook of the user's."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # the frames, without an exception that left them
    trace: TracebackType | None = None
    while frame is not None and frame.f_code is not _ENGINE:
        if not _OWN.search(frame.f_code.co_filename):
            trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    node: Any = torch._C._current_autograd_node()  # noqa: SLF001  # no public name for it
    if trace is None and node is not None and isinstance(error, CrossDeviceError):
        error.node = node.name()
        stack = (_FRAME.match(line) for line in node.metadata.get("traceback_", ()))
        error.made_by = tuple((found[1], int(found[2])) for found in stack if found is not None)
    _kept.append(error.with_traceback(trace))


class _Keeper:
    """Keeps what is raised inside of it, and goes on."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            _kept.append(error)
        return isinstance(error, Exception)


def _keeping(register: Callable[..., Any]) -> Callable[..., Any]:
    """A method that registers a hook, with all that the hook raises while the engine runs kept."""

    @functools.wraps(register)
    def registered(owner: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(hook)
        def kept(*given: Any) -> Any:
            if not is_running():
                return hook(*given)
            with _Keeper():
                return hook(*given)

        return register(owner, kept, *args, **kwargs)

    return registered


@contextlib.contextmanager
def gradients_checked(name_of: Callable[[torch.device], str]) -> Iterator[None]:
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
        error.argument = code.co_varnames[1] if code.co_argcount > 1 else ""
    return error


@contextlib.contextmanager
def kept_until_the_end() -> Iterator[None]:
    """Have the engine raise at its end what was kept, while the context is open."""
    module: Any = torch.autograd
    engine = module._engine_run_backward  # noqa: SLF001  # as `torch.autograd.backward` and `grad` call it

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return engine(*args, **kwargs)
        finally:
            if _kept and not is_running():  # of one backward inside of another, the outer one tells
                first = _kept[0]
                _kept.clear()
                raise first

    module._engine_run_backward = run  # noqa: SLF001  # another takes its place while the device stands
    for owner, register in _REGISTRARS:
        setattr(owner, register.__name__, _keeping(register))
    try:
        yield
    finally:
        module._engine_run_backward = engine  # noqa: SLF001  # the engine, put back
        for owner, register in _REGISTRARS:
            setattr(owner, register.__name__, register)
