"""The report of an error that ends a command: one line, a hint with the command line corrected, and an exit code."""

from __future__ import annotations

import re
import shlex
import traceback
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from ckptmove.api.failures import BUG, USAGE, Failure, failure_of
from ckptmove.cli.config import MOVED, WRITERS, set_format, set_reports
from ckptmove.cli.configured import runs_script
from ckptmove.cli.meant import with_command
from ckptmove.cli.outcome import PROGRAM, interruption
from ckptmove.cli.ranks import own_rank
from ckptmove.cli.render.renderer import Summary
from ckptmove.cli.render.report_files import replace_earlier
from ckptmove.cli.render.reports import open_error_report
from ckptmove.cli.render.text import sentence
from ckptmove.cli.signals import Terminated
from ckptmove.cli.streams import say
from ckptmove.errors import CkptMoveError, NotAPath, OutOfMemory, StdoutFailed, UnknownDevice
from ckptmove.io.remote.address import is_url, redacted
from ckptmove.moves import Remap
from ckptmove.proof.downloading import CopyExists, NotDownloaded
from ckptmove.text import Argument, command_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.text import Phrase

_COMMANDS: Final = ("inspect", "convert", "verify", "diff", "rules")
#: Typer's words for a text that is no number.
_NOT_A_NUMBER: Final = re.compile(r"is not a valid int(?:eger)?(?: range)?(?=\.)")
#: Names of options in other programs.
_MEANT: Final = {
    **dict.fromkeys(("--device", "--dst", "--dest", "--target", "--map-location"), "--to"),
    "--overwrite": "--force",
}
#: Base class of Typer's usage errors. Typer exports only this subclass, and its base has moved between modules.
_TyperUsageError: Final[type[Any]] = typer.BadParameter.__mro__[1]


def report(error: BaseException, words: Sequence[str]) -> int:
    """Report the exception that ended a command, and return the exit code."""
    if isinstance(error, MemoryError) and not isinstance(error, OutOfMemory):
        error = OutOfMemory()
    if isinstance(error, CkptMoveError):
        failure = failure_of(error)
        failure = failure._replace(hint=_retyped_hint(error, failure.hint, words))
    elif isinstance(error, _TyperUsageError):
        failure = _usage(error, words)
    elif isinstance(error, (typer.Abort, KeyboardInterrupt, Terminated)):
        failure = interruption(error)
    else:
        return _report(_bug(error), words)
    code = _report(failure, words)
    command = _command(words)
    configured = set_reports(Path()) if command == "verify" else {}
    replace_earlier(_own(words), configured, Summary(command, code, (failure,)), error)
    return code


def agreed(code: int, words: Sequence[str]) -> int:
    """The exit code of all ranks, if torchrun started ``verify``; else the code itself."""
    rank = own_rank() if _command(words) == "verify" else None
    agreed = code if rank is None else rank.finish(code)
    if rank is not None and agreed is None and rank.failure is not None:
        agreed = _write(Failure(**rank.failure), words)  # rank 0 does not write it
    return code if agreed is None else agreed


def _own(words: Sequence[str]) -> list[str]:
    """The words before ``--``; those after it can be arguments of the user's script."""
    return [*takewhile("--".__ne__, words)]


def _retyped_hint(error: CkptMoveError, hint: str, words: Sequence[str]) -> str:
    """The hint for an error that ended the command, with the whole command line where it can be corrected."""
    if isinstance(error, UnknownDevice) and error.suggestion is not None:
        return f"did you mean: {retyped(PROGRAM, words, error.device, error.suggestion)}"
    if isinstance(error, NotAPath):
        return f"did you mean: {retyped(PROGRAM, words, error.word, f'{error.option}={error.word}')}"
    if error.mends:
        return _mended(error.mends, hint, words)
    own = _own(words)
    if isinstance(error, NotDownloaded):
        return f"{hint}: {command_line([PROGRAM, *own, '--download', '.', *words[len(own) :]])}"
    if isinstance(error, CopyExists):
        command, *kept = (word for word in without(own, "--download") if not is_url(word))
        line = command_line([PROGRAM, command, error.path or "", *kept, *words[len(own) :]])
        return f"verify the copy: {line}; or choose another folder"
    return hint


def _mended(mends: Sequence[Phrase], hint: str, words: Sequence[str]) -> str:
    """The hint with the whole command line; only its options, if one of them replaces what was typed."""
    from ckptmove.api.mends import arguments_of

    given = [one for phrase in mends for one in arguments_of(phrase)]
    if any(one.name in {"output", "strip_prefix"} for one in given):
        return hint
    own = _own(words)
    left = [word for word in own if word != "--in-place" or Argument("in_place", False) not in given]
    added = [word for one in given if one.value for word in shlex.split(one.in_shell)]
    texts = " and ".join(str(phrase.parts[0]).rstrip(": ") for phrase in mends)
    removed = " --in-place" if len(left) < len(own) else ""
    return f"{texts}{removed}: {command_line([PROGRAM, *left, *added, *words[len(own) :]])}"


def _usage(error: Any, words: Sequence[str]) -> Failure:
    command = error.ctx.command_path if error.ctx is not None else PROGRAM
    if not WRITERS.isdisjoint(map(_parameter_of, getattr(error, "possibilities", None) or ())):
        error.possibilities = None  # near spellings
    message = _NOT_A_NUMBER.sub("is not a whole number", " ".join(error.format_message().split()))
    if command == PROGRAM and message.startswith("Option "):  # an option of the command, which Typer has not parsed yet
        command = f"{PROGRAM} {words[0]}"
    hint = f"{command} --help"
    option = getattr(error, "option_name", None)
    if option is not None and error.ctx is not None and runs_script(_own(words), error.ctx.command):
        hint = f"{hint}; arguments of the script follow after --: -- {option} ..."
    meant = _MEANT.get(option or "")
    if option and meant and any(meant in parameter.opts for parameter in error.ctx.command.params):
        message = f"No such option: {option}"
        hint = f"did you mean: {retyped(PROGRAM, words, option, meant)}"
    elif (
        option == "--to"
        and message.startswith("No such")
        and any("--expect" in parameter.opts for parameter in error.ctx.command.params)
    ):
        hint = f"did you mean: {retyped(PROGRAM, words, option, '--expect')}"
    elif option and command == f"{PROGRAM} verify" and _parameter_of(option) in Remap._fields:
        message, hint = f"No such option: {option}", "convert has it, and --verify: ckptmove convert --help"
    elif option and _parameter_of(option) in MOVED and command != PROGRAM and message.startswith("No such"):
        message = f"No such option: {option}"
        hint = f"did you mean: {_with_fit(_own(words), option)}"
    elif command == PROGRAM and message.startswith("No such"):
        known = {name: {*chain(*(one.opts for one in own.params))} for name, own in error.ctx.command.commands.items()}
        hint = with_command(PROGRAM, words, known)
    return Failure(kind="usage", message=message, hint=hint, path=None, exit_code=USAGE)


def _parameter_of(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _with_fit(own: Sequence[str], option: str) -> str:
    """The command line of ``inspect --fit`` in place of another command; with PATH if that has more options."""
    at = next(index for index, word in enumerate(own) if word.partition("=")[0] == option)
    typed, is_joined, value = own[at].partition("=")
    if not is_joined:
        value = "".join(word for word in own[at + 1 : at + 2] if not word.startswith("-"))
    paths = [*own[1:at], *own[at + (1 if is_joined or not value else 2) :]]
    if not paths or any(word.startswith("-") for word in paths):
        paths = ["PATH"]
    devices = value if typed == "--fit" else f"1x{value}"
    return command_line([PROGRAM, "inspect", *paths, "--fit", devices if value else "NxSIZE"])


def _bug(error: BaseException) -> Failure:
    for line in "".join(traceback.format_exception(error)).splitlines():
        say(sentence(redacted(line)))
    return Failure(
        kind="bug",
        message=f"{type(error).__name__}: {error}",
        hint="this is a bug in ckptmove: please report it with the lines above",
        path=None,
        exit_code=BUG,
    )


def _command(words: Sequence[str]) -> str | None:
    return next((word for word in words if word in _COMMANDS), None)


def _report(failure: Failure, words: Sequence[str]) -> int:
    """Write an error that ended the command, in the format of the command line, and return its exit code."""
    rank = own_rank() if _command(words) == "verify" else None
    if rank is not None and not rank.reports(failure._asdict()):
        return failure.exit_code
    return _write(failure, words)


def _write(failure: Failure, words: Sequence[str]) -> int:
    failure = failure._replace(message=redacted(failure.message), hint=redacted(failure.hint))  # they quote the words
    command = _command(words)
    if failure.kind == StdoutFailed.kind:  # an error in another format cannot be written there either
        renderer = open_error_report(())
    else:
        renderer = open_error_report(_own(words), set_format(Path()) if command == "verify" else "")
    try:
        renderer.failure(failure)
        renderer.finish(Summary(command, failure.exit_code, (failure,)))
    except StdoutFailed as error:
        return _write(failure_of(error), words)
    return failure.exit_code


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
