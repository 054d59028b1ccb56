"""Compile nothing in a process that makes one step: that would take minutes, and fail on a simulated device.

Without code of the user, ``torch._dynamo`` is not even imported. Making and stepping an optimizer imports it to mark
functions that a compiler must skip (torch/optim/optimizer.py ``_use_grad_for_differentiable``, torch/_compile.py
``_disable_dynamo``). It has some 800 modules, which take about as long to import as torch itself. It is still imported
if anything more of it is used.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.simulation.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ckptmove.proof.request import VerifyRequest

_NAME: Final = "torch._dynamo"
_torch: Any = torch


class Uncompiled(ModuleType):
    """The functions of ``torch._dynamo`` that a step calls."""

    @staticmethod
    def disable(function: Callable[..., object], *_options: object, **_more: object) -> Callable[..., object]:
        """Return the function unchanged."""
        return function

    @staticmethod
    def graph_break(*_options: object, **_more: object) -> None:
        """Do nothing: there is no graph."""

    def __getattr__(self, name: str) -> object:
        """Import the real module for anything else."""
        if name == "__file__":
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME], _torch._dynamo  # the real module must not find this one
        import torch._dynamo as real

        return getattr(real, name)


def leave_out_dynamo() -> None:
    """Install :class:`Uncompiled` as ``torch._dynamo``, unless the real module is imported already.

    Libraries that compile functions of their own, as torchao does, call them as they are.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if _NAME not in sys.modules:
        _torch._dynamo = sys.modules[_NAME] = Uncompiled(_NAME)


@contextmanager
def uncompiled_calls() -> Iterator[None]:
    """Call the functions and modules that the user's code compiles as they are, while the context is open.

    ``torch.compile`` returns what it always does: a module in an ``OptimizedModule``, whose keys begin with
    ``_orig_mod.``. With ``TORCHDYNAMO_DISABLE=1`` in the environment it would return the module itself.
    """
    import torch._dynamo as dynamo

    compiler: Any = torch.compiler
    if not hasattr(compiler, "set_stance"):  # torch 2.4 and 2.5
        config: Any = dynamo.config
        with config.patch(disable=True):
            yield
        return
    set_stance = compiler.set_stance
    # A script may set another stance, which would compile.
    with set_stance("force_eager"), replaced(compiler, set_stance=lambda *_stance, **_more: set_stance("force_eager")):
        yield


def torch_for(request: VerifyRequest) -> AbstractContextManager[None]:
    """Set torch up for a request, until the context is closed."""
    if not request.runs_training:
        # A batch fits in a processor's cache: a second thread saves a tenth of the time. If another process uses that
        # thread's processor, the first thread waits for it thousands of times.
        torch.set_num_threads(1)
    if request.runs_own_code:
        return uncompiled_calls()  # a user's model or optimizer may need the real compiler
    leave_out_dynamo()
    return nullcontext()
