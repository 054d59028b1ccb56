"""ckptmove: inspect, convert and verify PyTorch checkpoints that have to move to another device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmove.api import Inspection, convert, diff, inspect, undo, verify
    from ckptmove.case import Case

__all__ = ["Case", "Inspection", "convert", "diff", "inspect", "undo", "verify"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Give the use-cases at first sight: whoever asks for help or a version does not pay for them."""
    if name not in __all__:
        raise AttributeError(f"module 'ckptmove' has no attribute '{name}'")
    from ckptmove import api, case  # noqa: PLC0415  # --help does not wait for them

    return getattr(case if name == "Case" else api, name)


def __dir__() -> list[str]:
    """What is there and what comes at first sight, so that completion knows it."""
    return sorted({*globals(), *__all__})
