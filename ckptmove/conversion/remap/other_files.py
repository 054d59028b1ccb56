"""Find the files, links and folders of a checkpoint that a new directory or archive keeps."""

from __future__ import annotations

from collections import Counter
from posixpath import dirname, join, normpath
from typing import TYPE_CHECKING

from ckptmove.checkpoint.layouts.detect import is_index

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.io.listing import Listing


def with_links(listing: Listing, gone: Iterable[str]) -> frozenset[str]:
    """Paths that are left out, with the links to them, and the folders that become empty."""
    folders = (folder.path for folder in listing.folders if folder.path)
    members = Counter(dirname(path) for path in (*listing.names, *folders))
    links: dict[str, list[str]] = {}
    for link in listing.links:
        links.setdefault(normpath(join(dirname(link.path), link.target)), []).append(link.path)
    found: set[str] = set()
    left = list(gone)
    while left:
        path = left.pop()
        found.add(path)
        left += links.get(path, ())
        folder = dirname(path)
        members[folder] -= 1
        if folder and not members[folder]:
            left.append(folder)
    return frozenset(found)


def files_of(checkpoint: OpenCheckpoint, listing: Listing, names: Collection[str]) -> frozenset[str]:
    """Paths of the files of some parts: a distributed checkpoint has several in its folder."""
    own = {part.name for part in checkpoint.parts}.union(checkpoint.others)
    ranks = {row.path: row.part for part in checkpoint.parts for row in part.rows if row.part is not None}
    own |= ranks.keys()
    pieces = (file for file in listing.files if not file.is_hidden and file.path not in own and file.folder in names)
    joined = (path for path, part in ranks.items() if part in names)
    return listing.names & own.intersection(names).union(joined, (file.path for file in pieces))


def replaced_by_shards(checkpoint: OpenCheckpoint, listing: Listing, new: Collection[str]) -> frozenset[str]:
    """Paths that a directory of new shards leaves out: checkpoints, indexes, and links to them.

    Of an archive, files outside of its top folder are left out too, and those that macOS adds for other files.

    Args:
        checkpoint: the original.
        listing: its files.
        new: names of the new files; links to them are kept.
    """
    gone = files_of(checkpoint, listing, {part.name for part in checkpoint.parts})
    gone |= {file.path for file in listing.files if is_index(file.name) or not file.path.startswith(checkpoint.top)}
    gone |= {file.path for file in listing.files if file.is_hidden and "/." not in f"/{file.folder}"}
    return gone | with_links(listing, gone.difference(new))
