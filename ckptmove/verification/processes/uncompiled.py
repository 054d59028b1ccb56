"""Avoid the import of ``torch._dynamo`` in a process that compiles nothing.

Making and stepping an optimizer imports it to mark functions that a compiler must skip (torch/optim/optimizer.py
``_use_grad_for_differentiable``, torch/_compile.py ``_disable_dynamo``). It has some 800 modules, which take about
as long to import as torch itself. It is still imported if anything more of it is used.
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
    """The functions of ``torch._dynamo`` that a step calls."""

    @staticmethod
    def disable(function: Callable[..., object], *_options: object, **_more: object) -> Callable[..., object]:
        """Return the function unchanged."""
        return function

    @staticmethod
    def graph_break(*_options: object, **_more: object) -> None:
        """Do nothing: there is no graph."""

    def __getattr__(self, name: str) -> object:
        """Import the real module for anything else.

        Raises:
            AttributeError: for ``__file__``, which ``inspect.getmodule`` looks for in each module. The import of
                ``torch.distributed.tensor`` calls it, and would find itself half imported in the real module.
        """
        if name == "__file__":
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME], _torch._dynamo  # the real module must not find this one
        import torch._dynamo as real

        return getattr(real, name)


def leave_out_dynamo() -> None:
    """Install :class:`Uncompiled` as ``torch._dynamo``, unless the real module is imported already."""
    if _NAME not in sys.modules:
        _torch._dynamo = sys.modules[_NAME] = Uncompiled(_NAME)
