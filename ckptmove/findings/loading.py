"""Python that loads what a finding is about, out of however many files.

Never names a file that the finding says nothing of, where it can tell which one it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.directories import DirectoryInventory
from ckptmove.findings.context import load_expression

if TYPE_CHECKING:
    from ckptmove.directories import FileRecord
    from ckptmove.model import Inventory


def file_of(inventory: Inventory, where: str) -> FileRecord | None:
    """The file of a directory, or of an archive, that something stands in by its path from the root."""
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    around = (file for file in files if f"{where}.".startswith(f"{file.path}."))
    return max(around, key=lambda file: len(file.path), default=None)


def load_whole(inventory: Inventory, where: str) -> str:
    """Python that loads all of the file that something stands in."""
    file = file_of(inventory, where)
    return load_expression(inventory, "" if file is None else file.path)
