"""Exit codes of commands, and the failure of an interrupted one."""

from __future__ import annotations

import re
from signal import Signals
from typing import TYPE_CHECKING, Final

from ckptmove.api.failures import Failure
from ckptmove.cli.signals import Terminated
from ckptmove.text import command_line

if TYPE_CHECKING:
    from collections.abc import Sequence

YES: Final = 0
NO: Final = 1
INTERRUPTED: Final = 130
#: A shell adds this to the number of a signal that ends a program.
_SIGNALLED: Final = 128


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


def without(words: Sequence[str], option: str) -> list[str]:
    """The words without an option and its value."""
    values = {index + 1 for index, word in enumerate(words) if word == option}
    return [
        word
        for index, word in enumerate(words)
        if index not in values and word != option and not word.startswith(f"{option}=")
    ]
