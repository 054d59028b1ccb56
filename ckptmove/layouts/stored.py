"""A checkpoint with the places of its bytes: a file, a directory or an archive of files, all in one form.

Never reads a tensor's bytes, and never keeps more than a few files of a directory open, nor the tree of any.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint import naming, open_checkpoint
from ckptmove.collector import collector_paused
from ckptmove.containers.opening import open_container
from ckptmove.directories import ArchiveOfFiles
from ckptmove.layouts.archive import open_archive
from ckptmove.layouts.distributed import is_distributed
from ckptmove.layouts.distributed_part import DistributedPart
from ckptmove.layouts.open_files import OpenFiles
from ckptmove.layouts.reading import list_recovered, read_listing
from ckptmove.layouts.stored_part import FileContents, FilePart
from ckptmove.streams.source import is_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.checkpoint import Checkpoint
    from ckptmove.containers.distributed import DistributedCheckpoint
    from ckptmove.contracts import ByteSource
    from ckptmove.layouts.distributed import DistributedFolder
    from ckptmove.layouts.listing import Listing
    from ckptmove.layouts.stored_part import StoredPart
    from ckptmove.limits import Limits
    from ckptmove.pickles.tree import Value


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that is open.

    Attributes:
        path: as it was given.
        parts: the checkpoints that it is made of; of a file, itself.
        links: where those in it lead, by their paths.
        others: paths of these, and of the files in it that are no checkpoints.
        top: the folder that everything in an archive lies in, with a slash; else empty.
        listing: what it consists of; None for a file.
    """

    path: str
    parts: tuple[StoredPart, ...]
    links: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    top: str = ""
    listing: Listing | None = None

    @property
    def is_whole(self) -> bool:
        """Whether names begin with no path: it is one file, or one distributed checkpoint."""
        return [part.name for part in self.parts] == [""]

    def described(self, other: str) -> str:
        """What a file is by its SHA-256, and a link by where it leads.

        Args:
            other: one of ``others``.

        Raises:
            UnreadableInput: it cannot be read, or is not what was listed any more.
        """
        if other in self.links:
            return f"a link to {self.links[other]}"
        digest = hashlib.sha256()
        with naming(self.path):
            for block in cast("Listing", self.listing).contents(other):  # without a listing, there are no others
                digest.update(block)
        return f"sha256 {digest.hexdigest()}"


def side_by_side(one: StoredCheckpoint, other: StoredCheckpoint) -> tuple[StoredCheckpoint, StoredCheckpoint]:
    """Two checkpoints as they are compared: where both have the top folder of one, it is no archive's own."""
    is_shared = _has_folder(other, one.top), _has_folder(one, other.top)
    return replace(one, top="" if is_shared[0] else one.top), replace(other, top="" if is_shared[1] else other.top)


def _has_folder(side: StoredCheckpoint, folder: str) -> bool:
    return any(f"{path}/".startswith(folder) for path in (*(part.name for part in side.parts), *side.others))


@contextmanager
def open_stored(path: str, limits: Limits) -> Iterator[StoredCheckpoint]:
    """Read a checkpoint, and find the bytes of its storages.

    Args:
        path: a file, a directory or an archive of files.
        limits: what it, and each file in it, may ask for.

    Raises:
        UnreadableInput: it cannot be read, is damaged, or is no checkpoint.
        LimitExceeded: it asks for more than the limits allow.
    """
    with ExitStack() as stack:
        with naming(path):  # what goes wrong later may be about the other side
            stored = _of_folder(path, limits, stack) if is_folder(path) else _of_file(path, limits, stack)
        yield stored


def _of_folder(path: str, limits: Limits, stack: ExitStack) -> StoredCheckpoint:
    return _of_files(list_recovered(path, limits), limits, stack)


def _of_file(path: str, limits: Limits, stack: ExitStack) -> StoredCheckpoint:
    try:
        checkpoint = stack.enter_context(open_checkpoint(path, limits))
    except ArchiveOfFiles:
        return _of_files(stack.enter_context(open_archive(path, limits)), limits, stack)
    return stored_file(checkpoint)


def stored_file(checkpoint: Checkpoint) -> StoredCheckpoint:
    """A checkpoint of one file that is open, in this form.

    Raises:
        CrcMismatch: the bytes of something that is no tensor differ from their CRC.
    """
    contents = FileContents.of(checkpoint)
    source, machine = checkpoint.container.source, checkpoint.machine
    part = FilePart("", checkpoint.inventory, source, contents, lambda: machine.root)
    return StoredCheckpoint(checkpoint.inventory.path, (part,))


def _of_files(listing: Listing, limits: Limits, stack: ExitStack) -> StoredCheckpoint:
    contents: dict[str, FileContents] = {}
    folders: dict[str, tuple[DistributedFolder, DistributedCheckpoint]] = {}

    def visit(name: str, checkpoint: Checkpoint) -> None:
        contents[name] = FileContents.of(checkpoint)

    def visit_distributed(folder: DistributedFolder, container: DistributedCheckpoint) -> None:
        folders[folder.path] = folder, container

    read = read_listing(listing, limits, visit=visit, visit_distributed=visit_distributed)
    files = stack.enter_context(closing(OpenFiles(listing)))
    parts: list[StoredPart] = []
    for part in read.parts:
        name = part.file.path
        if name in contents:
            source = files.source(name)
            parts.append(FilePart(name, part.inventory, source, contents[name], partial(_root, source, limits)))
        else:
            parts.append(DistributedPart(part.inventory, *folders[name], files, limits))
    homes = {folder.folder for folder, _ in folders.values()}
    links = {link.path: link.target for link in listing.links}
    paths = [*(file.path for file in listing.files if not file.is_hidden), *links]
    others = tuple(path for path in paths if path not in contents and not _is_piece(path, homes))
    return StoredCheckpoint(listing.path, tuple(parts), links, others, _top(listing) if listing.form else "", listing)


def _root(source: ByteSource, limits: Limits) -> Value:
    """The root of the tree of a file, read again."""
    with naming(source.path), collector_paused():
        return open_container(source.path, limits, source).read().root


def _is_piece(path: str, homes: set[str]) -> bool:
    folder, _, name = path.rpartition("/")
    return folder in homes and is_distributed(name)


def _top(listing: Listing) -> str:
    """The folder that everything lies in, as in the archive that somebody has made of a directory."""
    tops = {file.path.partition("/")[0] if "/" in file.path else "" for file in listing.files if not file.is_hidden}
    (top,) = tops if len(tops) == 1 else ("",)
    return f"{top}/" if top else ""
