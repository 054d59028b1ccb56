"""ckptmove: inspect, convert and verify PyTorch checkpoints for use on another device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptmove.api import Inspection, convert, diff, inspect, undo, verify
    from ckptmove.case import Case

__all__ = ["Case", "Inspection", "convert", "diff", "inspect", "undo", "verify"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import the public functions on first use, so that ``--help`` and ``--version`` start fast."""
    if name not in __all__:
        raise AttributeError(f"module 'ckptmove' has no attribute '{name}'")
    from ckptmove import api, case

    return getattr(case if name == "Case" else api, name)


def __dir__() -> list[str]:
    """List the names that are imported on first use too, for completion."""
    return sorted({*globals(), *__all__})
