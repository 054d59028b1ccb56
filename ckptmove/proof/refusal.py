"""The reason for which ``torch.load(weights_only=True)`` refuses a file."""

from __future__ import annotations

# Not from pickle: no module of ckptmove imports what can execute a file. torch does not list the name as its own.
from torch._weights_only_unpickler import UnpicklingError  # type: ignore[attr-defined]

__all__ = ["UnpicklingError", "reason_of"]


def reason_of(error: BaseException) -> str:
    """First line of the weights-only unpickler's message, without the advice that ``torch.load`` adds.

    Args:
        error: the exception of ``torch.load``; its context is that of the unpickler.

    Returns:
        The reason; empty for any other exception.
    """
    cause = error.__context__
    if not isinstance(error, UnpicklingError) or not isinstance(cause, (UnpicklingError, RuntimeError)):  # 2.4: latter
        return ""
    if not str(error).startswith("Weights only load failed"):
        return ""  # of another unpickler, after torch had refused the file
    return str(cause).strip().partition("\n")[0].partition(". Please use")[0].rstrip(".")
