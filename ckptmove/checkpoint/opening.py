"""Open a checkpoint: a file, a directory, an archive of files or a distributed checkpoint."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
from ckptmove.checkpoint.parts import FilePart, read_file
from ckptmove.errors import ArchiveOfFiles
from ckptmove.io.locations import is_folder
from ckptmove.io.recovery import recover
from ckptmove.io.source import open_source
from ckptmove.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.io.contracts import Progress


@contextmanager
def open_checkpoint(
    location: str,
    limits: Limits | None = None,
    *,
    files: bool = True,
    objects: bool = True,
    keep_trees: bool = False,
    keep_going: bool = False,
    check: bool = False,
    outline: bool = False,
    progress: Progress | None = None,
) -> Iterator[OpenCheckpoint]:
    """Read a checkpoint without the bytes of its tensors, after undoing an interrupted conversion in place.

    The tree of a single file is kept until the checkpoint is closed. The trees of a directory or an archive are
    dropped one by one, because thousands of them do not fit into memory.

    Args:
        location: path of the checkpoint.
        limits: resource limits for reading each of its files.
        files: whether to read an archive of files as a checkpoint.
        objects: whether to read the objects of a distributed checkpoint that are not tensors.
        keep_trees: whether to keep the trees of a directory or an archive.
        keep_going: whether to leave out files of a directory or an archive that cannot be read. The error of the first
            is raised if none can be read.
        check: whether to compare every record with its CRC.
        outline: whether to make the outline.
        progress: called with the bytes checked so far and the total.

    Raises:
        UnreadableInput: if it is unreadable, damaged or not a checkpoint.
        ArchiveOfFiles: if it is an archive of files, and ``files`` is not set.
        LimitExceeded: if it needs more than the limits allow.
        BeingConverted, RollbackFailed: as of :func:`ckptmove.io.recovery.recover`.
    """
    limits = limits or Limits()
    with ExitStack() as stack:
        with naming(location):  # later errors may be about another checkpoint
            listing, recovered = None, ""
            if is_folder(location):
                from ckptmove.checkpoint.layouts.reading import list_recovered  # noqa: PLC0415  # not for a file

                listing = list_recovered(location, limits)
            else:
                recovered = recover(location)
                source = open_source(location)
                stack.callback(source.close)
                try:
                    content = read_file(source, limits)
                except ArchiveOfFiles:
                    if not files:
                        raise
                    from ckptmove.checkpoint.layouts.archive import list_archive  # noqa: PLC0415  # not for a file

                    listing = list_archive(source, limits)
            if listing is None:
                part = FilePart(content, limits, source.place)
                stack.callback(part.close)
                del content
                inventory = part.inventory
                if check:
                    inventory = replace(inventory, facts=part.check(progress))
                source.require_unchanged()
                checkpoint = OpenCheckpoint(
                    inventory, (part,), (source.place,), recovered, part.outline() if outline else ()
                )
            else:
                from ckptmove.checkpoint.layouts.reading import Reader  # noqa: PLC0415  # not for a file

                reader = Reader(
                    listing,
                    limits,
                    objects=objects,
                    keep_trees=keep_trees,
                    keep_going=keep_going,
                    check=check,
                    outline=outline,
                    progress=progress,
                )
                stack.callback(reader.close)
                checkpoint = reader.read()
        yield checkpoint
