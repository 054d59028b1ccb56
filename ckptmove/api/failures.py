"""The exit code, the message and the hint of each error."""

from __future__ import annotations

from typing import Final, NamedTuple

from ckptmove import errors
from ckptmove.io.locations import read_link
from ckptmove.io.remote.address import redacted
from ckptmove.proof.errors import ChildKilled, ConversionDiffers
from ckptmove.training.mesh.errors import RankFailed

NO: Final = 1
USAGE: Final = 2
REFUSED: Final = 4
BUG: Final = 70
#: Exit codes of the families of errors; every error belongs to one.
_EXIT_CODES: Final = {
    errors.UsageError: USAGE,
    errors.UnreadableInput: 3,
    errors.Refused: REFUSED,
    errors.WriteFailed: 5,
    errors.StdoutFailed: 5,
    ChildKilled: BUG,
    ConversionDiffers: NO,
}


class Failure(NamedTuple):
    """An error with its hint."""

    kind: str  # kebab-case name of the error
    message: str  # the error, in one line
    hint: str  # what to do next; may be empty
    path: str | None  # the checkpoint or the file in it that failed, or None
    exit_code: int
    checkpoint: str | None = None  # path of the checkpoint, if the command reads several; `path` can be a file in it

    @property
    def text(self) -> str:
        """The message and the hint in one line."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


def failure_of(error: errors.CkptMoveError) -> Failure:
    """The exit code, message and hint of an error."""
    from ckptmove.api.hints import hint_for  # has the errors of most rooms, which a command without one need not import

    if isinstance(error, RankFailed):
        return Failure(error.kind, error.message, error.hint, error.path, error.exit_code)
    # A dangling link has its own message, because something exists at its path.
    dangling = read_link(error.path or "") if isinstance(error, errors.MissingFile) else ""
    message = f"a link to {dangling}, which does not exist" if dangling else error.message
    code = next((code for family, code in _EXIT_CODES.items() if isinstance(error, family)), BUG)
    return Failure(
        kind=error.kind,
        message=redacted(message),
        hint=redacted(hint_for(error)),
        path=None if error.path is None else redacted(error.path),
        exit_code=code,
    )
