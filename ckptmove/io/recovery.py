"""Find files whose conversion in place was interrupted. Such a file is not read, and only ``--undo`` rolls it back.

Without a journal this costs one lookup. Nothing is written: a journal may be forged, and come with its folder.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ckptmove.errors import RollbackFailed
from ckptmove.io.locations import is_journal, journal_name, journal_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def require_settled(path: str) -> None:
    """Check that no conversion in place of a file is under way, or was interrupted."""
    try:
        if not os.path.lexists(journal_path(path)):
            return
    except ValueError:
        return  # an invalid name: opening it reports the error
    from ckptmove.io.changes import InterruptedConversion
    from ckptmove.io.patch import read_journal

    try:
        if read_journal(path) is None:
            return
    except RollbackFailed:
        pass  # the rollback reports why its journal cannot be read
    raise InterruptedConversion(path)


def with_journals(paths: Sequence[str]) -> Iterator[str]:
    """Those files of a directory that have a journal next to them; paths with slashes."""
    journals = {path for path in paths if is_journal(path.rpartition("/")[2])}
    for path in paths if journals else ():
        home, slash, name = path.rpartition("/")
        if home + slash + journal_name(name) in journals:
            yield path
