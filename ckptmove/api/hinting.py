"""Give the errors of the API their hints."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptmove.errors import CkptMoveError
from ckptmove.text import spelled_in_python

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def hinted() -> Iterator[None]:
    """Set ``hint`` of an error raised inside, and name arguments; Python 3.11 and later show it below the message.

    Raises:
        CkptMoveError: as raised inside.
    """
    try:
        yield
    except CkptMoveError as error:
        from ckptmove.api.hints import hint_in_python

        error.message = spelled_in_python(error.message)
        error.args = (error.message,)
        error.hint = hint_in_python(error)
        error.__dict__["__notes__"] = [f"hint: {error.hint}"] if error.hint else []  # Python 3.10 has no `add_note`
        raise
