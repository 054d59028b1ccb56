"""Roll back an interrupted conversion in place before a checkpoint is opened.

Without a journal this costs one lookup. A rollback always warns.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from ckptmove.io.journal import is_journal, journal_name, journal_path

if TYPE_CHECKING:
    from collections.abc import Sequence


def recover(path: str) -> str:
    """Roll back an interrupted conversion in place of a file, with a warning.

    Returns:
        The message of the warning; empty without a journal.

    Raises:
        BeingConverted: if the conversion is still running.
        RollbackFailed: if the rollback fails.
    """
    try:
        if not os.path.lexists(journal_path(path)):
            return ""
    except ValueError:
        return ""  # an invalid name: opening it reports the error
    from ckptmove.io.changes import RolledBack
    from ckptmove.io.patch import roll_back

    message = roll_back(path)
    if message:
        warnings.warn(f"{path}: {message}", RolledBack, stacklevel=2)
    return message


def recover_listed(folder: str, paths: Sequence[str]) -> bool:
    """Recover all files of a directory; return whether any was recovered."""
    journals = {path for path in paths if is_journal(path.rpartition("/")[2])}
    if not journals:
        return False
    found = False
    for path in paths:
        home, slash, name = path.rpartition("/")
        if home + slash + journal_name(name) in journals:
            found = bool(recover(os.path.join(folder, path))) or found
    return found
