"""Answer questions about paths, and name default outputs, without opening a file."""

from __future__ import annotations

import difflib
import os
import re
import zlib
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from ckptmove.errors import WriteFailed
from ckptmove.io.portable import ALL, NEW_FILE, SEPARATORS
from ckptmove.io.remote.address import Address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: For a mistyped path: entries of its folder to compare with, and the least similarity.
_MOST_ENTRIES: Final = 1000
_NEARLY: Final = 0.8
#: Start and end of the name of a journal, which is next to its file. It is a hidden name of fixed length, computed from
#: the name of the file, so that one lookup finds it.
_JOURNAL: Final = (".ckptmove-", ".journal")
_DRIVE: Final = re.compile(r"[A-Za-z]:")


class OpenFile(str):
    """The name of a file object in messages, with the object, which its owner closes."""

    __slots__ = ("file",)

    file: BinaryIO

    def __new__(cls, file: BinaryIO) -> OpenFile:
        """Name a file object by its class."""
        named = super().__new__(cls, f"<{type(file).__name__}>")
        named.file = file
        return named


def is_folder(path: str) -> bool:
    """Whether a path leads to a directory; False if the system refuses to look."""
    return os.path.isdir(path)


def exists(path: str) -> bool:
    """Whether a path exists; True for a dangling link."""
    return os.path.lexists(path)


def leads_nowhere(path: str) -> bool:
    """Whether a path is a link whose target does not exist."""
    return os.path.lexists(path) and not os.path.exists(path)


def same_file(one: str, other: str) -> bool:
    """Whether two paths lead to one file: by name, through a symbolic link, or as hard links."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def link_target(path: str) -> str:
    """The file that a symbolic link leads to; empty if the path is not a link."""
    return os.path.realpath(path) if os.path.islink(path) else ""


def leads_out(path: str) -> bool:
    """Whether the name of a member of an archive leads out of the directory that it is written to, on any system."""
    parts = path.replace("\\", "/").split("/")
    return ".." in parts or (len(parts) > 1 and not parts[0]) or _DRIVE.match(path) is not None


def other_names(path: str) -> int:
    """Number of other hard links to a file; 0 if the system refuses to look."""
    with suppress(OSError):
        return os.stat(path).st_nlink - 1
    return 0


def shared_mode(paths: Iterable[str]) -> int:
    """The permission bits that all files at some paths have, and all that is in a folder; of a new file without any.

    What can be read from the files may be shown to those who can read all of them.
    """
    modes = [mode for path in paths for mode in _modes(path)]
    shared = ALL if modes else NEW_FILE
    for mode in modes:
        shared &= mode
    return shared


def _modes(path: str) -> Iterator[int]:
    walked = os.walk(path) if is_folder(path) else ()
    inner = (os.path.join(folder, name) for folder, _, names in walked for name in ("", *names))
    for one in chain([path], inner):
        with suppress(OSError, ValueError):  # a URL, or a file that another error reports
            yield os.stat(one).st_mode


def inode_of(path: str) -> int:
    """Inode of a file."""
    return os.stat(path).st_ino


def split_suffix(path: str) -> tuple[str, str]:
    """Split a path into its root and its suffix, which begins with a dot or is empty."""
    return os.path.splitext(path)


def stem(path: str) -> str:
    """The last part of a path without its suffix; ``archive`` if nothing is left, as torch calls the folder."""
    return split_suffix(os.path.basename(path))[0].lstrip(".") or "archive"


def make_folder(path: str) -> None:
    """Create a folder with its parents, unless it exists."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteFailed(path, os.strerror(error.errno or 0)) from error


def remove_empty_folder(path: str) -> None:
    """Remove a folder if nothing is in it."""
    with suppress(OSError):
        Path(path).rmdir()


def without_suffix(path: str) -> str:
    """The path of a file without its suffix, which a folder of the same name does not have; of a URL, the name."""
    if isinstance(path, Address):
        path = path.name
    return path if is_folder(path) else split_suffix(path.removesuffix(".tar"))[0]


def inside(folder: str, path: str) -> str:
    """The path of a file or folder of the same name in another folder."""
    if isinstance(path, Address):
        return os.path.join(folder, path.name)
    return os.path.join(folder, os.path.basename(path.rstrip(SEPARATORS)))


def default_output(path: str, tag: str) -> str:
    """Name an output next to its source: ``model.cuda0.pth`` for ``model.pth``, ``run.cuda0`` for a directory.

    The output of a URL is in the working directory.
    """
    if isinstance(path, Address):
        path = path.name
    elif is_folder(path):
        plain = path.rstrip(SEPARATORS)
        has_name = os.path.basename(plain) not in {"", ".", ".."}
        return f"{plain if has_name else os.path.realpath(path)}.{tag}"
    root, suffix = split_suffix(path)
    if root.endswith(".pth") and suffix == ".tar":  # model.pth.tar, by far the commonest double suffix
        root, suffix = root.removesuffix(".pth"), ".pth.tar"
    return f"{root}.{tag}{suffix}"


def similar_path(path: str) -> str:
    """The path in the same folder with the most similar name; empty if none is similar."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in islice(entries, _MOST_ENTRIES) if entry.name != name]
    except OSError:
        return ""
    return "".join(os.path.join(folder, near) for near in difflib.get_close_matches(name, names, n=1, cutoff=_NEARLY))


def read_link(path: str) -> str:
    """The target of a symbolic link, as stored; empty for other paths."""
    try:
        return os.readlink(path)  # a Path would normalize the target
    except OSError:
        return ""


def journal_name(name: str) -> str:
    """Return the name of a file's journal."""
    return f"{zlib.crc32(os.fsencode(name)):08x}".join(_JOURNAL)


def is_journal(name: str) -> bool:
    """Whether a name has the form of a journal's name."""
    return name.startswith(_JOURNAL[0]) and name.endswith(_JOURNAL[1])


def home_of(path: str) -> tuple[str, str]:
    """Return the folder and the name of a file; of a symbolic link, those of its target."""
    real = os.path.realpath(path) if os.path.islink(path) else path
    folder, name = os.path.split(real)
    return folder or os.curdir, name


def journal_path(path: str) -> str:
    """Return the path of a file's journal, which is next to the file."""
    folder, name = home_of(path)
    return os.path.join(folder, journal_name(name))
