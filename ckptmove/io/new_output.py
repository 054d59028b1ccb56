"""Check the path of an output before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

from ckptmove.errors import OutputExists, OutputIsFolder, OutputIsSource
from ckptmove.io.leftovers import clear_leftovers
from ckptmove.io.locations import exists, is_folder, same_file
from ckptmove.io.portable import SEPARATORS, shared_folder


def require_new_file(source: str, output: str, name: str, *, force: bool) -> None:
    """Check the path of a new file, and remove what interrupted runs left in its folder.

    If the output is a folder, the last part of ``name`` is suggested as a name.
    """
    clear_leftovers(Path(output).parent)
    if is_folder(output) or output.endswith(tuple(SEPARATORS)):
        raise OutputIsFolder(output, os.path.join(output, os.path.basename(name)))
    if same_file(source, output):
        raise OutputIsSource(output)
    _require_free(output, force=force)


def require_new_folder(source: str, output: str, *, force: bool) -> None:
    """Check the path of a new directory, and remove what interrupted runs left next to it."""
    before, after = os.path.realpath(source), os.path.realpath(output)
    if before == after:
        raise OutputIsSource(output)
    shared = shared_folder(before, after)
    if shared == before:
        raise OutputIsSource(output, "is inside the source")
    if shared == after:
        raise OutputIsSource(output, "holds the source")
    clear_leftovers(Path(output).parent)
    _require_free(output, force=force)


def _require_free(output: str, *, force: bool) -> None:
    if not force and exists(output):
        raise OutputExists(output)
