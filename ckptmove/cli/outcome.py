"""The exit code, the message and the hint of each error."""

from __future__ import annotations

import re
from signal import Signals
from typing import TYPE_CHECKING, Final

from ckptmove import errors
from ckptmove.cli.hints import hint_for
from ckptmove.cli.meant import read_link
from ckptmove.cli.render.answers import Failure
from ckptmove.cli.signals import Terminated
from ckptmove.text import command_line

if TYPE_CHECKING:
    from collections.abc import Sequence

YES: Final = 0
NO: Final = 1
USAGE: Final = 2
REFUSED: Final = 4
BUG: Final = 70
INTERRUPTED: Final = 130
#: A shell adds this to the number of a signal that ends a program.
_SIGNALLED: Final = 128

#: Exit codes of the families of errors; every error belongs to one.
_EXIT_CODES: Final = {
    errors.UsageError: USAGE,
    errors.UnreadableInput: 3,
    errors.Refused: REFUSED,
    errors.WriteFailed: 5,
    errors.StdoutFailed: 5,
}


def failure_of(error: errors.CkptMoveError) -> Failure:
    """The exit code, message and hint of an error."""
    code = next((code for family, code in _EXIT_CODES.items() if isinstance(error, family)), BUG)
    return Failure(
        kind=error.kind,
        message=_fact(error),
        hint=hint_for(error),
        path=error.path,
        exit_code=code,
    )


def _fact(error: errors.CkptMoveError) -> str:
    """The message of an error. A dangling link gets its own message, because something exists at the path."""
    target = read_link(error.path or "") if isinstance(error, errors.MissingFile) else ""
    return f"a link to {target}, which does not exist" if target else error.message


def interruption(error: BaseException) -> Failure:
    """The failure for Ctrl-C, SIGTERM or SIGHUP, with the exit code that a shell uses for it."""
    message, code = "interrupted", INTERRUPTED
    if isinstance(error, Terminated):
        message, code = f"ended by {Signals(error.number).name}", _SIGNALLED + error.number
    return Failure(kind="interrupted", message=message, hint="", path=None, exit_code=code)


def retyped(program: str, words: Sequence[str], wrong: str, right: str) -> str:
    """The command line with one device or option corrected; only the correction, if it was not typed but configured."""
    pattern = re.compile(rf"(?:(?<==)|^){re.escape(wrong)}(?==|$)")
    corrected = [pattern.sub(right, word) for word in words]
    return command_line([program, *corrected]) if corrected != [*words] else right
