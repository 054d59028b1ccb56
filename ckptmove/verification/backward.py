"""What a simulated device refuses while the autograd engine runs, kept until it has ended.

Never lets an exception of an operation out through the engine.

There it would end the process: for a device of Python's, `torch::acc::PythonDeviceGuard::exchangeStream` calls Python
while the exception is on its way, and is noexcept. So the step goes on with a value in place of the refused one, and
the first refusal is raised when the engine returns.
"""

from __future__ import annotations

import contextlib
import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd import graph

from ckptmove.verification.simulated_rules import CrossDeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

#: What an operation raises.
ERRORS: Final = (RuntimeError, TypeError, ValueError, IndexError)
_ENGINE: Final = graph._engine_run_backward.__code__  # noqa: SLF001  # the one function that runs the engine
_OWN: Final = re.compile(r"/ckptmove/verification/(simulated|backward)\.py$|/torch/_(compile|dynamo/.*)\.py$")
#: A line of `traceback.format_stack`, as anomaly detection keeps it.
_FRAME: Final = re.compile(r'\s*File "(.*)", line (\d+), in ')

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
    try:
        yield
    finally:
        module._engine_run_backward = engine  # noqa: SLF001  # the engine, put back
