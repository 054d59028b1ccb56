"""``torch._dynamo`` left out of a process that compiles nothing.

Never stands in the way of whoever wants more of it than a step does: then it is imported after all.

Making and stepping an optimizer imports it, to tell a compiler what to leave alone (torch/optim/optimizer.py
``_use_grad_for_differentiable``, torch/_compile.py ``_disable_dynamo``): some 800 modules, which take about as long as
torch itself.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME: Final = "torch._dynamo"
_torch: Any = torch


class Uncompiled(ModuleType):
    """What a step asks of ``torch._dynamo``, where nothing is compiled."""

    @staticmethod
    def disable(function: Callable[..., object], *_options: object, **_more: object) -> Callable[..., object]:
        """A function that is not compiled: itself."""
        return function

    @staticmethod
    def graph_break(*_options: object, **_more: object) -> None:
        """Nothing: there is no graph."""

    def __getattr__(self, name: str) -> object:
        """Anything else, from the real module."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME], _torch._dynamo  # noqa: SLF001  # what comes is not to find this while it is imported
        import torch._dynamo as real  # noqa: PLC0415  # as late as can be: that is what this module is for

        return getattr(real, name)


def leave_out_dynamo() -> None:
    """Put :class:`Uncompiled` in the place of ``torch._dynamo``, if that is not there yet."""
    if _NAME not in sys.modules:
        _torch._dynamo = sys.modules[_NAME] = Uncompiled(_NAME)  # noqa: SLF001  # no public name for it
