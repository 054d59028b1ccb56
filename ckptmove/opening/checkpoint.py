"""Open a checkpoint: a file, a directory, an archive of files or a distributed checkpoint."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
from ckptmove.checkpoint.parts import FilePart, naming_dangers, read_file
from ckptmove.errors import ArchiveOfFiles
from ckptmove.io.file_object import FileObjectSource, OpenFile
from ckptmove.io.listing import list_directory
from ckptmove.io.locations import is_folder
from ckptmove.io.recovery import require_settled
from ckptmove.io.remote.address import Address, as_location
from ckptmove.io.source import open_source
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ckptmove.checkpoint.parts import TreeUse
    from ckptmove.io.contracts import Progress, Traffic
    from ckptmove.io.listing import Listing
    from ckptmove.io.remote.source import RemoteSource
    from ckptmove.io.source import DiskPlace, FileSource
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
    """
    limits = limits or Limits()
    with ExitStack() as stack:
        with naming(location):  # later errors may be about another checkpoint
            location = as_location(location)
            traffic = None
            if isinstance(location, Address):
                found, traffic = _remote(location, limits, stack, files=files, tree=tree, members=members)
            elif is_folder(location):
                found = list_directory(location, limits)
                if members is not None:
                    found = found.only({member.path for member in members})
            else:
                found = _file(location, limits, stack, files=files, tree=tree)
            if isinstance(found, OpenCheckpoint):
                checkpoint = _looked_into(found, check=check, jobs=jobs, outline=outline, progress=progress)
            else:
                from ckptmove.opening.reading import Reader

                reader = Reader(
                    found.without(exclude),
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
        del checkpoint, found
        yield opened.pop()  # this function keeps no reference, so a caller can free the inventory


def _file(path: str, limits: Limits, stack: ExitStack, *, files: bool, tree: TreeUse) -> OpenCheckpoint | Listing:
    """Read a checkpoint file, or list an archive of files."""
    if isinstance(path, OpenFile):
        return _read(FileObjectSource(path), None, limits, stack, files=files, tree=tree)
    require_settled(path)
    source = open_source(path)
    return _read(source, source.place, limits, stack, files=files, tree=tree)


def _remote(
    address: Address,
    limits: Limits,
    stack: ExitStack,
    *,
    files: bool,
    tree: TreeUse,
    members: Sequence[WalkedFile] | None,
) -> tuple[OpenCheckpoint | Listing, Traffic]:
    """Read a remote checkpoint file, or list a remote directory or archive; and the requests."""
    from ckptmove.io.remote.filesystem import list_members, open_remote
    from ckptmove.io.remote.source import RemoteSource

    found = open_remote(address, limits) if members is None else list_members(address, members)
    if isinstance(found, RemoteSource):
        return _read(found, None, limits, stack, files=files, tree=tree), found.traffic
    return found, found.traffic


def _read(
    source: FileSource | FileObjectSource | RemoteSource,
    place: DiskPlace | None,
    limits: Limits,
    stack: ExitStack,
    *,
    files: bool,
    tree: TreeUse,
) -> OpenCheckpoint | Listing:
    """Read a checkpoint file, or list an archive of files."""
    stack.callback(source.close)
    try:
        part = FilePart(read_file(source, limits, tree=tree), limits, place)
    except ArchiveOfFiles:
        if not files or isinstance(source, FileObjectSource):
            raise
        from ckptmove.opening.archive import list_archive

        with naming_dangers(source, limits):
            return list_archive(source, limits)
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
