"""Add the path of a file to errors that lack it."""

from __future__ import annotations

from contextlib import contextmanager
from traceback import clear_frames
from typing import TYPE_CHECKING

from ckptmove.errors import CkptMoveError, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Add a path to errors without one, and turn MemoryError into OutOfMemory."""
    try:
        yield
    except CkptMoveError as error:
        error.path = error.path or path
        raise
    except MemoryError as error:
        clear_frames(error.__traceback__)  # the frames hold what filled the memory
        raise OutOfMemory(path) from None
