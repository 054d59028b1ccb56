"""How much memory the child process may take, held by the system.

Never limits a process that drives a real accelerator, whose driver reserves far more than it uses, and never one that
runs the user's own code: a case, or an optimizer that torch does not have.

What counts is memory that is private and can be written to (``RLIMIT_DATA``): a file that is mapped counts too, as its
pages would if they were written to. Address space (``RLIMIT_AS``) would not do: torch reserves more than it uses.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.torch_facts.optimizers import BY_NAME
from ckptmove.verification.place import find_site

if TYPE_CHECKING:
    from ckptmove.verification.request import VerifyRequest

#: What a child may take besides what torch has taken when it is imported: of a small file it takes 100 MiB.
_IN_ANY_CASE: Final = 2**32
#: For each byte of the files, as many as their values may take: LBFGS was seen to take 83, every other optimizer 3.
_PER_BYTE: Final = 256
#: For each processor, whose thread has a stack and an arena of its own.
_PER_PROCESSOR: Final = 2**26
#: Threads with larger stacks than this are somebody's own setting, by one of these names or by ``ulimit -s``.
_USUAL_STACK: Final = 2**24
_STACKS: Final = frozenset({"OMP_STACKSIZE", "KMP_STACKSIZE", "GOMP_STACKSIZE"})
#: Of this process, in pages; the sixth is what it has of its own.
_FIGURES: Final = Path("/proc/self/statm")
#: How torch and Python say that there is no memory left.
_SAID: Final = ("can't allocate memory", "Cannot allocate memory", "MemoryError", "bad_alloc", "not enough memory")
#: What to do about it.
HINT: Final = "it needs more memory than a file of this size may take; if you trust the file: --limit-factor 10"


def limit_memory(request: VerifyRequest) -> bool:
    """Hold this process to a size that follows from that of the files.

    Args:
        request: what is verified.

    Returns:
        Whether there is a limit: for the user's own code and on a real accelerator there is none, nor where the system
        does not say what a process has, or threads have stacks of a size that somebody has chosen.
    """
    is_foreign = request.case is not None or not (request.optimizer is None or request.optimizer in BY_NAME)
    if is_foreign or find_site(request.to or "cpu").mode == "real":
        return False
    try:
        import resource  # noqa: PLC0415  # Windows has no limits

        pages = int(_FIGURES.read_text(encoding="ascii").split()[5])
    except (ImportError, OSError):
        return False
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack > _USUAL_STACK or not _STACKS.isdisjoint(os.environ):
        return False
    room = request.limits.factor * (_IN_ANY_CASE + _PER_BYTE * request.nbytes) + _PER_PROCESSOR * (os.cpu_count() or 1)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    least = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_DATA, (least if most == resource.RLIM_INFINITY else min(least, most), most))
    return True


def explained(message: dict[str, object]) -> dict[str, object]:
    """An answer of the child, with what to do where a check failed for want of memory."""
    check = message.get("check")
    if not isinstance(check, dict) or check["status"] != "failed" or not any(one in check["detail"] for one in _SAID):
        return message
    return {"check": {**check, "detail": f"{check['detail']}; {HINT}"}}
