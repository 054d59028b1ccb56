"""Detect a save that was interrupted while it replaced an earlier one in the same folder.

``torch.distributed.checkpoint.save`` writes over an earlier checkpoint, and writes ``.metadata`` last. If a rank is
killed, the folder has files of both saves, and the ``.metadata`` of the earlier one. A load reads
them without an error.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from ckptmove.model import ArchiveFact

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.checkpoint.layouts.distributed import DistributedFolder
    from ckptmove.checkpoint.layouts.distributed_part import DistributedPart
    from ckptmove.io.listing import Listing

#: A copy of a folder, which may set the times of its files anew, is assumed to write at least this many bytes in a
#: nanosecond, after a pause of at most two seconds.
_SLOWEST_COPY: Final = 0.02
_PAUSE: Final = 2_000_000_000


def newer_files(listing: Listing, folder: DistributedFolder, sizes: Mapping[str, int]) -> dict[str, int]:
    """Names and sizes in bytes of files that were written after the ``.metadata`` of their folder, as by a later save.

    A plain copy writes one file after the other, in any order. So a file counts only if the time between it and the
    file before it is longer than a copy takes.

    Args:
        listing: the directory that contains the folder.
        folder: the folder.
        sizes: sizes in bytes of the files that its ``.metadata`` names.
    """
    times = {file.path: file.stamp[-1] for file in listing.files}
    latest = times.get(folder.metadata, sys.maxsize)  # a link has no time of its own
    found: dict[str, int] = {}
    for time, name in sorted((times.get(folder.full(name), 0), name) for name in sizes):
        if found or time - latest > _PAUSE + sizes[name] / _SLOWEST_COPY:
            found[name] = sizes[name]
        latest = max(latest, time)
    return found


def find_two_saves(part: DistributedPart, newer: Mapping[str, int]) -> Iterator[ArchiveFact]:
    """Facts about newer files: of another save if their step counts differ from those in all other files."""
    if not newer:
        return
    counts: dict[bool, set[float]] = {True: set(), False: set()}
    for optimizer in part.inventory.optimizers:
        for entry in optimizer.state:
            record = entry.tensor("step")
            if record is not None and (count := part.number(record)) is not None:
                counts[any(name in newer for name in part.files_of(record))].add(count)
    differ = all(counts.values()) and counts[True].isdisjoint(counts[False])
    for name, nbytes in newer.items():
        yield ArchiveFact("other-save" if differ else "newer-file", name, nbytes)
