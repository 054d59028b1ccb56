"""From errors to what the command line says and leaves with: exit code and one line.

Never prints, and never catches anything.
"""

from __future__ import annotations

import re
from signal import Signals
from typing import TYPE_CHECKING, Final

from ckptmove import errors
from ckptmove.cli.hints import hint_for
from ckptmove.cli.meant import link_target
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
#: What a shell adds to the number of a signal that ends a program.
_SIGNALLED: Final = 128

#: Exit codes of the families; every error belongs to one.
_EXIT_CODES: Final = {
    errors.UsageError: USAGE,
    errors.UnreadableInput: 3,
    errors.Refused: REFUSED,
    errors.WriteFailed: 5,
    errors.StdoutFailed: 5,
}


def failure_of(error: errors.CkptMoveError) -> Failure:
    """An error of ours, as it is told."""
    code = next((code for family, code in _EXIT_CODES.items() if isinstance(error, family)), BUG)
    return Failure(
        kind=error.kind,
        message=_fact(error),
        hint=hint_for(error),
        path=error.path,
        exit_code=code,
    )


def _fact(error: errors.CkptMoveError) -> str:
    """What an error says; of a link, for which there is something at the path, that it leads nowhere."""
    target = link_target(error.path or "") if isinstance(error, errors.MissingFile) else ""
    return f"a link to {target}, which does not exist" if target else error.message


def interruption(error: BaseException) -> Failure:
    """An interruption from outside, as it is told: Ctrl-C, SIGTERM or SIGHUP, with the code that a shell gives it."""
    message, code = "interrupted", INTERRUPTED
    if isinstance(error, Terminated):
        message, code = f"ended by {Signals(error.number).name}", _SIGNALLED + error.number
    return Failure(kind="interrupted", message=message, hint="", path=None, exit_code=code)


def retyped(program: str, words: Sequence[str], wrong: str, right: str) -> str:
    """The command again, with a device or an option corrected; only that, where it was not typed but configured."""
    pattern = re.compile(rf"(?:(?<==)|^){re.escape(wrong)}(?==|$)")
    corrected = [pattern.sub(right, word) for word in words]
    return command_line([program, *corrected]) if corrected != [*words] else right
