"""Rules about the files beside a checkpoint: S702, S705 and F805 for files that are not read, and S704 for code."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.directories import DirectoryInventory, unread_of
from ckptmove.findings.catalogue import found
from ckptmove.model import Severity
from ckptmove.text import amount, quoted, some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory

_SHOWN: Final = 4
#: Not a command: the folder may be no git repository.
_FETCH: Final = "fetch the real file: git lfs pull"


def dangerous_beside(inventory: DirectoryInventory) -> Iterator[Finding]:
    """S702: a file that is no checkpoint holds a pickle, which names what no checkpoint needs."""
    hostile = [file for file in inventory.unread if file.runs]
    if hostile:
        names = dict.fromkeys(name for file in hostile for name in file.runs)
        files = some([f"{file.path} ({file.found})" for file in hostile], _SHOWN)
        message = f"unpickling {files} could run {some([*names], _SHOWN)}"
        yield found("S702", message, [file.path for file in hostile], "do not load it, and do not trust its source")


def ambiguous_beside(inventory: DirectoryInventory) -> Iterator[Finding]:
    """F805: another reader sees something else in a file that was not read."""
    files = [file for file in inventory.unread if file.readings]
    if files:
        seen = some([f"{file.path} ({some(file.readings, _SHOWN)})" for file in files], _SHOWN)
        message = f"two readers see two things in {amount(len(files), 'file')} beside the checkpoint: {seen}"
        finding = found("F805", message, [file.path for file in files], "trust no copy of it")
        yield finding._replace(severity=Severity.ERROR)


def code_beside(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S704: the folder of the checkpoint has code that a loader would import."""
    for code in inventory.code if isinstance(inventory, DirectoryInventory) else ():
        if code.key:
            message = f"{code.path} names code that verify can run: {code.key}"
            fix = f"read {_path(inventory, code.path)} and that code before you run verify beside it"
        else:
            message = f"{code.path} names code in {some(code.files, _SHOWN)}, which trust_remote_code=True runs"
            fix = f"read {_path(inventory, code.files[0])} before you load the model with trust_remote_code=True"
        yield found("S704", message, [code.path, *code.files], fix)


def unread_files(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """S705: files that a loader may unpickle were not read."""
    quiet = [file for file in unread_of(inventory) if not file.runs]
    pointers = [file for file in quiet if file.found == "a git-lfs pointer"]
    others = [file for file in quiet if file not in pointers]
    if pointers:
        where = [file.path for file in pointers]
        message = f"{amount(len(where), 'file')} not fetched, only the git-lfs pointer is there: {some(where, _SHOWN)}"
        yield found("S705", message, where, _FETCH)
    if others:
        files = some([f"{file.path} ({file.found})" for file in others], _SHOWN)
        yield found("S705", f"{amount(len(others), 'file')} not read: {files}", [file.path for file in others], "")


def _path(inventory: Inventory, file: str) -> str:
    return quoted(posixpath.join(inventory.path, file))


#: The rules, in the order of the codes.
RULES: Final = (code_beside, unread_files)
