"""List a directory: its files, folders and links, within limits.

A link out of the directory is refused. The one exception is a snapshot of huggingface_hub's cache, whose files are all
links to ``blobs`` next to its ``snapshots``.
"""

from __future__ import annotations

import os
import posixpath
import stat
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from ckptmove.errors import AccessFailed, LimitExceeded, NotACheckpoint, reason_of
from ckptmove.io.leftovers import is_unfinished
from ckptmove.io.portable import ALL, shared_folder
from ckptmove.io.recovery import with_journals
from ckptmove.io.source import KINDS, DiskPlace, open_source, stamp_of
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ckptmove.io.contracts import ByteSource
    from ckptmove.io.source import Stamp
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, ArchiveForm

#: Folders inside of each other: those of a training run are three or four.
DEEPEST: Final = 64
_BLOCK: Final = 1 << 20


class ListedFile(NamedTuple):
    """A regular file."""

    path: str  # its path in the directory, with slashes
    size_bytes: int
    mode: int  # its permission bits
    stamp: Stamp  # its stamp; for a member of an archive, its place in the archive
    is_hidden: bool  # whether it is in a folder whose name begins with a dot, and so not a checkpoint

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """All but the last part of its path; empty for the directory itself."""
        return self.path.rpartition("/")[0]


class ListedFolder(NamedTuple):
    """A folder."""

    path: str  # as of a file; empty for the directory itself
    mode: int  # its permission bits


class ListedLink(NamedTuple):
    """A symbolic link to a path in the directory, or a dangling link."""

    path: str  # as of a file
    target: str  # text of the link in a copy of the directory

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def leads_to(self) -> str:
        """The path in the directory that it leads to."""
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.path), self.target))


@dataclass(frozen=True)
class Listing:
    """The content of a directory."""

    path: str  # the directory as the user gave it
    files: tuple[ListedFile, ...]  # by path
    folders: tuple[ListedFolder, ...]  # each before its content
    links: tuple[ListedLink, ...]  # by path
    #: paths of files with the journal of a conversion in place next to them.
    with_journals: tuple[str, ...] = field(default=(), kw_only=True)
    container: ClassVar[str] = "directory"  # name of its kind in the public contract
    form: ClassVar[ArchiveForm | None] = None  # form of an archive; None for a directory
    has_checksums: ClassVar[bool] = False  # whether it has a CRC of each file
    is_remote: ClassVar[bool] = False  # whether its files are at URLs

    @property
    def names(self) -> frozenset[str]:
        """The paths of files and links."""
        return frozenset([*(file.path for file in self.files), *(link.path for link in self.links)])

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def facts(self) -> tuple[ArchiveFact, ...]:
        """Facts about an archive itself; a directory has none."""
        return ()

    @property
    def described(self) -> str:
        """Its kind in words."""
        return "a directory"

    def only(self, paths: Collection[str]) -> Listing:
        """The listing with these files alone, their folders, and the links in those."""
        files = tuple(file for file in self.files if file.path in paths)
        folders = {""}
        for file in files:
            parts = file.folder.split("/")
            folders |= {"/".join(parts[: at + 1]) for at in range(len(parts))}
        return replace(
            self,
            files=files,
            with_journals=tuple(path for path in self.with_journals if path in paths),
            folders=tuple(folder for folder in self.folders if folder.path in folders),
            links=tuple(link for link in self.links if link.path.rpartition("/")[0] in folders),
        )

    def without(self, folders: Collection[str]) -> Listing:
        """The listing without some folders, what is in them, and the links to that."""
        if not folders:
            return self

        def stays(path: str) -> bool:
            parts = path.split("/")
            return not any("/".join(parts[:end]) in folders for end in range(1, len(parts) + 1))

        return replace(
            self,
            files=tuple(file for file in self.files if stays(file.path)),
            with_journals=tuple(filter(stays, self.with_journals)),
            folders=tuple(folder for folder in self.folders if stays(folder.path)),
            links=tuple(link for link in self.links if stays(link.path) and stays(link.leads_to)),
        )

    @property
    def jobs(self) -> int:
        """Number of files to read at a time: the next ones while a server answers, and one of a directory."""
        return 1

    def full(self, path: str) -> str:
        """The path of something in the directory, as the system knows it."""
        return os.path.join(self.path, path)

    def look(self, path: str) -> None:
        """Raise NotACheckpoint if that is known without opening the file; in a directory, it never is."""

    def is_text(self, path: str) -> bool:
        """Whether a file is text by its name, and opening it takes a request; of a local directory, none is."""
        del path
        return False

    def require_opened_unchanged(self) -> None:
        """Raise SourceChanged if a file at a URL was written since it was opened. Local files have stamps."""

    def open(self, path: str) -> ByteSource:
        """The bytes of a file; the caller closes them."""
        return open_source(self.full(path))

    def read_ahead(self, paths: Iterable[str]) -> Iterator[str]:
        """The paths, in order; those at URLs are requested before they are returned, several at once."""
        return iter(paths)

    def disk(self, file: ListedFile) -> DiskPlace | None:
        """Place of the bytes of a file; None if they are compressed, which a directory never does."""
        return DiskPlace(self.full(file.path), 0, file.stamp)

    def read_from(self, files: Iterable[ListedFile]) -> tuple[DiskPlace, ...]:
        """The files on the disk that contain some of the files: each of them."""
        return tuple(DiskPlace(self.full(file.path), 0, file.stamp) for file in files)

    def contents(self, path: str) -> Iterator[bytes | memoryview]:
        """The bytes of a file block by block; each is valid until the next."""
        with closing(self.open(path)) as source:
            yield from source.blocks(Span(0, source.size), _BLOCK)

    def require_unchanged(self, file: ListedFile) -> None:
        """Raise SourceChanged if a file was written, replaced or removed since it was listed."""
        DiskPlace(self.full(file.path), 0, file.stamp).require_unchanged()

    def limits(self, path: str, limits: Limits) -> Limits:
        """Resource limits for a file, which are lower for a compressed member of an archive."""
        del path
        return limits

    def flaws(self, path: str) -> tuple[ArchiveFact, ...]:
        """Facts about the bytes of a file, after comparing them with a CRC; a directory has none."""
        del path
        return ()


def list_directory(path: str, limits: Limits) -> Listing:
    """List a directory with everything below it."""
    lister = _Lister(path, limits)
    try:
        lister.run()
    except OSError as error:
        raise AccessFailed(error.filename or path, reason_of(error)) from error
    files = tuple(sorted(lister.files, key=lambda file: file.path))
    return Listing(
        path,
        files,
        tuple(sorted(lister.folders, key=lambda folder: folder.path)),
        tuple(sorted(lister.links, key=lambda link: link.path)),
        with_journals=tuple(with_journals([file.path for file in files])),
    )


class _Lister:
    """Goes through a directory without recursion."""

    def __init__(self, path: str, limits: Limits) -> None:
        self._path = path
        self._limits = limits
        self._real = os.path.realpath(path)
        # Of a snapshot `MODEL/snapshots/REVISION`, the files are in `MODEL/blobs`: huggingface_hub/file_download.py
        # `_get_pointer_path` and `hf_hub_download`.
        above, _, name = os.path.dirname(self._real).rpartition(os.sep)
        self._blobs = f"{above}{os.sep}blobs" if name == "snapshots" else None
        self._entries = 0
        self.files: list[ListedFile] = []
        self.folders: list[ListedFolder] = []
        self.links: list[ListedLink] = []

    def run(self) -> None:
        mode = os.stat(self._path).st_mode & ALL
        self.folders.append(ListedFolder("", mode))
        todo = [("", 0, False)]
        while todo:
            folder, depth, is_hidden = todo.pop()
            if depth > DEEPEST:
                raise LimitExceeded(
                    "folders inside of each other", limit=DEEPEST, actual=depth, path=self._path, is_fixed=True
                )
            prefix = f"{folder}/" if folder else ""
            for entry in self._scan(folder):
                self._entries += 1
                if self._entries > self._limits.entries:
                    raise LimitExceeded(
                        "entries of a directory", limit=self._limits.entries, actual=self._entries, path=self._path
                    )
                path = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    self.folders.append(ListedFolder(path, entry.stat(follow_symlinks=False).st_mode & ALL))
                    todo.append((path, depth + 1, is_hidden or entry.name.startswith(".")))
                elif entry.is_symlink() and not self._is_blob(entry):
                    self._link(path, entry)
                else:
                    self._file(path, entry, is_hidden=is_hidden)

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        full = os.path.join(self._path, folder) if folder else self._path
        with os.scandir(full) as entries:
            # One more than the limit, for the caller to count. Unfinished outputs are not a part of the directory.
            whole = (entry for entry in entries if not is_unfinished(entry.name))
            return list(islice(whole, self._limits.entries - self._entries + 1))

    def _is_blob(self, entry: os.DirEntry[str]) -> bool:
        """Whether a link leads to a file of the cache, which counts as a file of the directory."""
        real = os.path.realpath(entry.path)
        return os.path.dirname(real) == self._blobs and os.path.isfile(real)

    def _file(self, path: str, entry: os.DirEntry[str], *, is_hidden: bool) -> None:
        found = os.stat(entry.path)  # the entry itself has neither device nor inode on Windows
        kind = KINDS.get(stat.S_IFMT(found.st_mode))
        if kind is not None:
            raise NotACheckpoint(entry.path, kind)
        mode = found.st_mode & ALL
        self.files.append(ListedFile(path, found.st_size, mode, stamp_of(found), is_hidden))

    def _link(self, path: str, entry: os.DirEntry[str]) -> None:
        real = os.path.realpath(entry.path)
        if not os.path.lexists(real) or os.path.islink(real):  # a loop ends at a link
            self.links.append(ListedLink(path, os.readlink(entry.path)))
            return
        if shared_folder(real, self._real) != self._real:
            raise NotACheckpoint(entry.path, "a symbolic link out of its directory")
        home = os.path.dirname(os.path.join(self._real, path))
        self.links.append(ListedLink(path, os.path.relpath(real, home)))
