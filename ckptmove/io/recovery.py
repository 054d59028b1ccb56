"""The look for a journal before a checkpoint is opened.

Never costs more than that look where there is none, and never takes a change back in silence.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from ckptmove.io.changes import RolledBack
from ckptmove.io.journal import is_journal, journal_name, journal_path

if TYPE_CHECKING:
    from collections.abc import Sequence


def recover(path: str) -> str:
    """Take back what an interrupted conversion in place has left of a file, and warn that it was so.

    Returns:
        What was done; empty where there was nothing to do.

    Raises:
        BeingConverted: the conversion is not interrupted, but under way.
        RollbackFailed: it cannot be taken back.
    """
    try:
        if not os.path.lexists(journal_path(path)):
            return ""
    except ValueError:
        return ""  # a name that no file system can hold: whoever opens it says so
    from ckptmove.io.patch import roll_back  # noqa: PLC0415  # nobody waits for what only a crash needs

    said = roll_back(path)
    if said:
        warnings.warn(f"{path}: {said}", RolledBack, stacklevel=2)
    return said


def recover_listed(folder: str, paths: Sequence[str]) -> bool:
    """The same for the files of a directory; whether there was something to do.

    Args:
        folder: the directory.
        paths: of all files in it, seen from there, parts joined by slashes.

    Raises:
        As :func:`recover`.
    """
    journals = {path for path in paths if is_journal(path.rpartition("/")[2])}
    if not journals:
        return False
    found = False
    for path in paths:
        home, slash, name = path.rpartition("/")
        if home + slash + journal_name(name) in journals:
            found = bool(recover(os.path.join(folder, path))) or found  # noqa: PTH118  # the path stays as it was typed
    return found
