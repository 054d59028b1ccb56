"""Open a checkpoint: a file, a directory, an archive of files or a distributed checkpoint."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
from ckptmove.checkpoint.parts import FilePart, naming_dangers, read_file
from ckptmove.errors import ArchiveOfFiles
from ckptmove.io.locations import OpenFile, is_folder
from ckptmove.io.recovery import require_settled
from ckptmove.io.remote.address import Address, as_location
from ckptmove.io.source import FileSource, open_source
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ckptmove.checkpoint.parts import FileContent, TreeUse
    from ckptmove.io.contracts import ByteSource, Progress, Traffic
    from ckptmove.io.file_object import FileObjectSource
    from ckptmove.io.listing import Listing
    from ckptmove.io.remote.source import RemoteSource
    from ckptmove.io.walk import WalkedFile


@contextmanager
def open_checkpoint(
    location: str,
    limits: Limits | None = None,
    *,
    files: bool = True,
    objects: bool = True,
    ranks: bool = True,
    keep_trees: bool = False,
    tree: TreeUse = "edit",
    keep_going: bool = False,
    check: bool = False,
    jobs: int = 1,
    outline: bool = False,
    progress: Progress | None = None,
    members: Sequence[WalkedFile] | None = None,
    exclude: Collection[str] = (),
    is_settled: bool = False,
) -> Iterator[OpenCheckpoint]:
    """Read a checkpoint without the bytes of its tensors. A file with a journal beside it is not read.

    The tree of a single file is kept until the checkpoint is closed, unless it is not needed. The trees of a directory
    or an archive are dropped one by one, because thousands of them do not fit into memory.

    Args:
        files: whether to read an archive of files as a checkpoint.
        objects: whether to read the objects of a distributed checkpoint that are not tensors.
        ranks: whether to read files of several ranks, with shards of the same DTensors, as one checkpoint.
        tree: what the tree of a single file is kept for.
        keep_trees: whether to keep the trees of a directory or an archive.
        keep_going: whether to leave out files of a directory or an archive that cannot be read. The error of the first
            is raised if none can be read.
        check: whether to compare every record with its CRC.
        members: the files of a directory that belong to the checkpoint, as a search has found them; None for all.
        exclude: folders in a directory that are checkpoints of their own, by their paths in it: they are not read.
        is_settled: whether to read a file with a journal too, because its change has been written.
    """
    limits = limits or Limits()
    with ExitStack() as stack:
        with naming(location):  # later errors may be about another checkpoint
            source, listing, traffic = _bytes_or_listing(as_location(location), limits, members, is_settled=is_settled)
            if source is not None:
                stack.callback(source.close)
                try:
                    checkpoint = _of_one_file(read_file(source, limits, tree=tree), source, limits, stack)
                except ArchiveOfFiles:
                    if not files or isinstance(location, OpenFile):
                        raise
                    listing = _members(source, limits)
                else:
                    if check or outline:
                        checkpoint = _looked_into(
                            checkpoint, check=check, jobs=jobs, outline=outline, progress=progress
                        )
            if listing is not None:
                from ckptmove.opening.reading import Reader

                reader = Reader(
                    listing.without(exclude),
                    limits,
                    objects=objects,
                    ranks=ranks,
                    keep_trees=keep_trees,
                    keep_going=keep_going,
                    check=check,
                    jobs=jobs,
                    outline=outline,
                    progress=progress,
                )
                stack.callback(reader.close)
                checkpoint = reader.read()
        opened = [replace(checkpoint, traffic=traffic)]
        del checkpoint
        yield opened.pop()  # this function keeps no reference, so a caller can free the inventory


def _bytes_or_listing(
    location: str, limits: Limits, members: Sequence[WalkedFile] | None, *, is_settled: bool
) -> tuple[FileSource | FileObjectSource | RemoteSource | None, Listing | None, Traffic | None]:
    """The bytes of a file, or the listing of a directory; and the requests for either, if it is remote."""
    if isinstance(location, Address):
        from ckptmove.io.remote.filesystem import list_members, open_remote
        from ckptmove.io.remote.source import RemoteSource

        found = open_remote(location, limits) if members is None else list_members(location, members)
        return (found, None, found.traffic) if isinstance(found, RemoteSource) else (None, found, found.traffic)
    if isinstance(location, OpenFile):
        from ckptmove.io.file_object import FileObjectSource

        return FileObjectSource(location), None, None
    if is_folder(location):
        from ckptmove.io.listing import list_directory

        listing = list_directory(location, limits)
        return None, listing if members is None else listing.only({member.path for member in members}), None
    if not is_settled:
        require_settled(location)
    return open_source(location), None, None


def _members(source: ByteSource, limits: Limits) -> Listing:
    """List an archive of files."""
    from ckptmove.opening.archive import list_archive

    with naming_dangers(source, limits):
        return list_archive(source, limits)


def _of_one_file(
    content: FileContent, source: FileSource | FileObjectSource | RemoteSource, limits: Limits, stack: ExitStack
) -> OpenCheckpoint:
    place = source.place if isinstance(source, FileSource) else None
    part = FilePart(content, limits, place)
    stack.callback(part.close)
    source.require_unchanged()
    return OpenCheckpoint(part.inventory, (part,), () if place is None else (place,))


def _looked_into(
    checkpoint: OpenCheckpoint, *, check: bool, jobs: int, outline: bool, progress: Progress | None
) -> OpenCheckpoint:
    """A checkpoint file with its facts checked and its outline made, if requested."""
    inventory = checkpoint.inventory
    return replace(
        checkpoint,
        inventory=replace(inventory, facts=checkpoint.check(progress, jobs)) if check else inventory,
        outline=checkpoint.file.outline() if outline else (),
    )
