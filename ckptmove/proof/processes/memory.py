"""Limit the memory of the child process.

The limit does not apply to a process that uses a real accelerator, whose driver reserves far more memory than it uses,
or to one that runs the user's own code (a case, or an optimizer from outside torch).

The limit is on private writable memory (``RLIMIT_DATA``). A mapped file counts too, because its pages could be written
to. Address space (``RLIMIT_AS``) cannot be limited: torch reserves more than it uses.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ckptmove.proof.place import find_site
from ckptmove.proof.processes.messages import Message
from ckptmove.text import Argument

if TYPE_CHECKING:
    from ckptmove.proof.request import VerifyRequest

#: Bytes allowed in addition to those in use after importing torch; a small file takes 100 MiB.
_IN_ANY_CASE: Final = 2**32
#: Bytes allowed for each byte of the files. Measured: 83 for LBFGS, 3 for every other optimizer.
_PER_BYTE: Final = 256
#: Bytes allowed for each processor, whose thread has its own stack and malloc arena.
_PER_PROCESSOR: Final = 2**26
#: Larger thread stacks are the user's setting, through one of these variables or ``ulimit -s``.
_USUAL_STACK: Final = 2**24
_STACKS: Final = frozenset({"OMP_STACKSIZE", "KMP_STACKSIZE", "GOMP_STACKSIZE"})
#: Memory figures of this process in pages; the sixth is data and stack (``man 5 proc_pid_statm``).
_FIGURES: Final = Path("/proc/self/statm")
#: Messages of torch and Python for an allocation that failed.
_SAID: Final = ("can't allocate memory", "Cannot allocate memory", "MemoryError", "bad_alloc", "not enough memory")


def memory_hint() -> str:
    """Hint for the user."""
    more = Argument("limit_factor", "10")
    return f"it needs more memory than a file of this size may take; if you trust the file: {more}"


def limit_memory(request: VerifyRequest) -> bool:
    """Limit the memory of this process in proportion to the size of the files.

    Returns:
        Whether a limit was set. No limit is set for the user's own code, on a real accelerator, if the system does
        not report the memory of a process, or if the user chose the size of thread stacks.
    """
    if request.runs_own_code or find_site(request.to or "cpu").mode == "real":
        return False
    try:
        import resource

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


def with_hint(message: Message) -> Message:
    """Add a hint to a check that failed because memory ran out."""
    check = message.check
    if check is None or check.status != "failed" or not any(one in check.detail for one in _SAID):
        return message
    return Message(check=check._replace(detail=f"{check.detail}; {memory_hint()}"))
