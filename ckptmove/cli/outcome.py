"""The name and the exit codes of the program, and the failure of an interrupted command."""

from __future__ import annotations

from signal import Signals
from typing import TYPE_CHECKING, Final

from ckptmove.cli.signals import Terminated

if TYPE_CHECKING:
    from ckptmove.api.failures import Failure

PROGRAM: Final = "ckptmove"
YES: Final = 0
NO: Final = 1
INTERRUPTED: Final = 130
#: A shell adds this to the number of a signal that ends a program.
_SIGNALLED: Final = 128


def interruption(error: BaseException) -> Failure:
    """The failure for Ctrl-C, SIGTERM or SIGHUP, with the exit code that a shell uses for it."""
    from ckptmove.api.failures import Failure

    message, code = "interrupted", INTERRUPTED
    if isinstance(error, Terminated):
        message, code = f"ended by {Signals(error.number).name}", _SIGNALLED + error.number
    return Failure(kind="interrupted", message=message, hint="", path=None, exit_code=code)
