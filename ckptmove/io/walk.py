"""List the files below a local folder by name, and identify versions of files without opening them."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.errors import AccessFailed, reason_of
from ckptmove.io.leftovers import is_unfinished
from ckptmove.io.locations import leads_nowhere

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.errors import CkptMoveError


class WalkedFile(NamedTuple):
    """A file below a folder."""

    path: str  # its path in the folder, with slashes
    size_bytes: int | None  # its size; None if the server does not tell it, or if it is a link that leads nowhere
    version: str  # its time of modification, or its ETag; empty if unknown


class FolderWalk(NamedTuple):
    """The files below a folder."""

    files: list[WalkedFile]  # the files, without hidden ones
    #: errors of folders that could not be listed, and of links that lead to no readable file.
    errors: list[CkptMoveError]


def walk(folder: str) -> FolderWalk:
    """List the files below a local folder. Links to folders are not followed, links to files are.

    A link that leads nowhere is a file of unknown size.

    A hidden file or folder is left out; ``.metadata`` is a file of ``torch.distributed.checkpoint``.
    """
    found = FolderWalk([], [])
    todo = [""]
    while todo:
        prefix = todo.pop()
        try:
            with os.scandir(os.path.join(folder, prefix)) as entries:
                for entry in entries:
                    path = prefix + entry.name
                    if is_left_out(entry.name):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(f"{path}/")
                    else:
                        _add_file(found, path, entry)
        except OSError as error:
            found.errors.append(AccessFailed(error.filename or folder, reason_of(error)))
    return found


def _add_file(found: FolderWalk, path: str, entry: os.DirEntry[str]) -> None:
    """Add a file, or an error of this entry alone."""
    try:
        if entry.is_file():
            found.files.append(_file(path, entry.stat()))
        elif entry.is_symlink() and leads_nowhere(entry.path):  # a missing file is an error when it is opened
            found.files.append(WalkedFile(path, None, ""))
    except FileNotFoundError:
        return  # it was deleted while the folder was listed
    except OSError as error:
        found.errors.append(AccessFailed(entry.path, reason_of(error)))


def is_left_out(name: str) -> bool:
    """Whether a file or folder of this name is no part of a search: it is hidden, or an unfinished output."""
    return (name.startswith(".") and name != ".metadata") or is_unfinished(name)


def fingerprint(files: Iterable[WalkedFile]) -> str | None:
    """A digest of the names, sizes and versions of files; None if a version is unknown."""
    digest = hashlib.sha256()
    for file in sorted(files):
        if not file.version:
            return None
        digest.update(repr(tuple(file)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def local_fingerprint(path: str) -> str | None:
    """The fingerprint of a local file or directory; None if it cannot be read."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISDIR(found.st_mode):
        return fingerprint([_file("", found)])
    below = walk(path)
    return None if below.errors else fingerprint(below.files)


def _file(path: str, found: os.stat_result) -> WalkedFile:
    return WalkedFile(path, found.st_size, str(found.st_mtime_ns))
