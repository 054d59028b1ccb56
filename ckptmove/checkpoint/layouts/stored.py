"""A checkpoint with the places of its bytes: a file, a directory or an archive of files, all in one form.

Never keeps more than a few files of a directory open, nor the tree of any unless that is asked for.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.layouts.archive import open_archive
from ckptmove.checkpoint.layouts.distributed import is_distributed
from ckptmove.checkpoint.layouts.distributed_part import DistributedPart
from ckptmove.checkpoint.layouts.listing import DiskPlace, stamp_of
from ckptmove.checkpoint.layouts.open_files import OpenFiles
from ckptmove.checkpoint.layouts.reading import list_recovered, read_listing
from ckptmove.checkpoint.layouts.stored_part import FileAccess, FileContents, FilePart
from ckptmove.checkpoint.opening import naming, open_checkpoint
from ckptmove.errors import ArchiveOfFiles
from ckptmove.formats.opening import open_container
from ckptmove.io.contracts import FileBacked
from ckptmove.io.counted import CountedSource
from ckptmove.io.source import is_folder
from ckptmove.pickles.collector import collector_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckptmove.checkpoint.layouts.distributed import DistributedFolder
    from ckptmove.checkpoint.layouts.listing import Listing
    from ckptmove.checkpoint.layouts.merge import Part
    from ckptmove.checkpoint.layouts.stored_part import StoredPart
    from ckptmove.checkpoint.opening import Checkpoint
    from ckptmove.formats.contract import Container
    from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint
    from ckptmove.io.contracts import ByteSource, Progress
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, Inventory
    from ckptmove.pickles.tree import Value


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that is open.

    Attributes:
        inventory: what it holds.
        parts: the checkpoints that it is made of; of a file, itself.
        read_from: the files on the disk that they lie in.
        links: where those in it lead, by their paths.
        others: paths of these, and of the files in it that are no checkpoints.
        top: the folder that everything in an archive lies in, with a slash; else empty.
        listing: what it consists of; None for a file.
        container: the file; None where there is a listing.
    """

    inventory: Inventory
    parts: tuple[StoredPart, ...]
    read_from: tuple[DiskPlace, ...]
    links: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    top: str = ""
    listing: Listing | None = None
    container: Container | None = None

    @property
    def path(self) -> str:
        """The checkpoint as it was given."""
        return self.inventory.path

    @property
    def kind(self) -> str:
        """What it is, for people."""
        if self.listing is None:
            return "a file"
        return "an archive of files" if self.listing.form else "a directory"

    @property
    def nbytes(self) -> int:
        """Size of the files that its parts are."""
        return sum(part.inventory.size_bytes for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether names begin with no path: it is one file, or one distributed checkpoint."""
        return [part.name for part in self.parts] == [""]

    def require_unchanged(self) -> None:
        """Refuse a checkpoint that is not the one that was read any more, seen from its path.

        Raises:
            SourceChanged: a file that it lies in was written, replaced or removed meanwhile.
        """
        for place in self.read_from:
            place.require_unchanged()

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


def check_bytes(stored: StoredCheckpoint, limits: Limits, progress: Progress | None = None) -> tuple[ArchiveFact, ...]:
    """All that is to be said of the bytes, each record compared with its CRC.

    Args:
        stored: an open checkpoint.
        limits: what its files may ask for.
        progress: told of bytes checked and bytes in all.

    Raises:
        UnreadableInput: a file cannot be read any more, or a piece of a tensor is not what it should be.
    """
    if stored.listing is not None:
        return read_listing(stored.listing, limits, check=True, progress=progress).inventory.facts
    container = cast("Container", stored.container)  # without a listing, it is one file
    if progress is not None:
        container.source = CountedSource(container.source, progress)
    return stored.inventory.facts + container.check()


@contextmanager
def open_stored(path: str, limits: Limits, *, to_resume: bool = False) -> Iterator[StoredCheckpoint]:
    """Read a checkpoint, and find the bytes of its storages.

    Args:
        path: a file, a directory or an archive of files.
        limits: what it, and each file in it, may ask for.
        to_resume: whether all that a resume needs is read at once: the tree of each file is held.

    Raises:
        UnreadableInput: it cannot be read, is damaged, or is no checkpoint.
        LimitExceeded: it asks for more than the limits allow.
    """
    with ExitStack() as stack:
        with naming(path):  # what goes wrong later may be about the other side
            found = _listing_or_file(path, limits, stack)
            stored = found if isinstance(found, StoredCheckpoint) else _of_files(found, limits, stack, to_resume)
        yield stored


def _listing_or_file(path: str, limits: Limits, stack: ExitStack) -> Listing | StoredCheckpoint:
    if is_folder(path):
        return list_recovered(path, limits)
    try:
        checkpoint = stack.enter_context(open_checkpoint(path, limits))
    except ArchiveOfFiles:
        return stack.enter_context(open_archive(path, limits))
    return stored_file(checkpoint)


def stored_file(checkpoint: Checkpoint) -> StoredCheckpoint:
    """A checkpoint of one file that is open, in this form."""
    container, machine, inventory = checkpoint.container, checkpoint.machine, checkpoint.inventory
    disk = _disk(container.source)
    access = FileAccess(
        source=lambda: container.source,
        root=lambda: machine.root,
        extras=lambda: dict(container.extras()),
        disk=disk,
    )
    part = FilePart("", container.source.path, inventory, FileContents.of(checkpoint), access)
    return StoredCheckpoint(inventory, (part,), () if disk is None else (disk,), container=container)


def _disk(source: ByteSource) -> DiskPlace | None:
    """Where the bytes of an open file lie, if it is still what it was when it was opened; None of bytes in memory."""
    if not isinstance(source, FileBacked):
        return None
    source.require_unchanged()
    return DiskPlace(source.path, 0, stamp_of(os.fstat(source.fileno())))


def _of_files(listing: Listing, limits: Limits, stack: ExitStack, to_resume: bool) -> StoredCheckpoint:  # passed on
    contents: dict[str, FileContents] = {}
    roots: dict[str, Value] = {}
    folders: dict[str, tuple[DistributedFolder, DistributedCheckpoint]] = {}

    def visit(name: str, checkpoint: Checkpoint) -> None:
        contents[name] = FileContents.of(checkpoint)
        if to_resume:
            roots[name] = checkpoint.machine.root

    def visit_distributed(folder: DistributedFolder, container: DistributedCheckpoint) -> None:
        folders[folder.path] = folder, container

    read = read_listing(listing, limits, objects=True, visit=visit, visit_distributed=visit_distributed)
    files = stack.enter_context(closing(OpenFiles(listing)))
    listed = {file.path: file for file in listing.files}

    def part_of(part: Part) -> StoredPart:
        name = part.file.path
        if name not in contents:
            return DistributedPart(part.inventory, *folders[name], files, limits, part.base)
        source = partial(files.source, name)
        root = (lambda: roots[name]) if to_resume else partial(_root, source, limits)
        access = FileAccess(
            source, root, partial(_extras, source, limits), listing.disk(listed[name]), listing.has_checksums
        )
        return FilePart(name, listing.full(name), part.inventory, contents[name], access, part.base)

    homes = {folder.folder for folder, _ in folders.values()}
    links = {link.path: link.target for link in listing.links}
    paths = [*(file.path for file in listing.files if not file.is_hidden), *links]
    others = tuple(path for path in paths if path not in contents and not _is_piece(path, homes))
    top = _top(listing) if listing.form else ""
    unread = {*others, *(file.path for file in listing.files if file.is_hidden)}
    held = listing.read_from(file for path, file in listed.items() if path not in unread)
    return StoredCheckpoint(read.inventory, tuple(map(part_of, read.parts)), held, links, others, top, listing)


def _root(opened: Callable[[], ByteSource], limits: Limits) -> Value:
    """The root of the tree of a file, read again."""
    source = opened()
    with naming(source.path), collector_paused():
        return open_container(source.path, limits, source).read().root


def _extras(opened: Callable[[], ByteSource], limits: Limits) -> Mapping[str, bytes]:
    """What a file holds besides its tree and its storages, hashed."""
    source = opened()
    return dict(open_container(source.path, limits, source).extras())


def _is_piece(path: str, homes: set[str]) -> bool:
    folder, _, name = path.rpartition("/")
    return folder in homes and is_distributed(name)


def _top(listing: Listing) -> str:
    """The folder that everything lies in, as in the archive that somebody has made of a directory."""
    tops = {file.path.partition("/")[0] if "/" in file.path else "" for file in listing.files if not file.is_hidden}
    (top,) = tops if len(tops) == 1 else ("",)
    return f"{top}/" if top else ""
