"""ckptmove: inspect, convert and verify PyTorch checkpoints for use on another device."""

#: Of ``typing``, which is not imported: ``python -m ckptmove`` runs this module with the current folder on its path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ckptmove.api.functions import convert, diff, inspect, undo, verify
    from ckptmove.api.inspection import Inspection
    from ckptmove.api.loading import load
    from ckptmove.api.results import ConvertResult, DiffResult, VerifyResult
    from ckptmove.case import Case

__all__ = [
    "Case",
    "ConvertResult",
    "DiffResult",
    "Inspection",
    "VerifyResult",
    "convert",
    "diff",
    "inspect",
    "load",
    "undo",
    "verify",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import the public functions on first use, so that ``--help`` and ``--version`` start fast."""
    if name not in __all__:
        raise AttributeError(f"module 'ckptmove' has no attribute '{name}'")
    if name == "Case":
        from ckptmove.case import Case

        return Case
    if name == "Inspection":
        from ckptmove.api.inspection import Inspection

        return Inspection
    if name == "load":
        from ckptmove.api.loading import load

        return load
    from ckptmove.api import functions

    return getattr(functions, name)


def __dir__() -> list[str]:
    """List the names that are imported on first use too, for completion."""
    return sorted({*globals(), *__all__})
