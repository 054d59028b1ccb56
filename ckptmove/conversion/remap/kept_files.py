"""Decide which files of a directory or an archive stay, change, and are left out."""

from __future__ import annotations

import json
from collections import Counter
from posixpath import dirname
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.checkpoint.inventory.shapes import as_dict, string_keys
from ckptmove.opening.detect import is_index

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.io.listing import Listing
    from ckptmove.model import StorageRef
    from ckptmove.moves import MovePlan
    from ckptmove.pickles.tree import Dict, Value

#: Kinds of facts about bytes that ``--compact`` changes in each file of ``torch.save``.
_UNREACHED: Final = frozenset({"orphan-record", "stray-bytes", "kept-for-undo", "compressed-storage"})


class KeptFiles(NamedTuple):
    """The files of a directory or an archive that keeps its format."""

    roots: Mapping[str, Value]  # new trees of the checkpoint files that stay, by path
    changed: frozenset[str]  # paths of the checkpoint files that change or are left out
    indexes: Mapping[str, bytes]  # new content of the indexes whose shards change, by path; empty if no key is left
    removed: frozenset[str]  # paths of the files, links and folders that are left out


def keep_files(
    checkpoint: OpenCheckpoint, listing: Listing, plan: MovePlan, root: Value, storages: Sequence[StorageRef]
) -> KeptFiles:
    """The files of a checkpoint after a remapping."""
    pairs = cast("Dict", root).pairs() if not checkpoint.is_whole else (("", root, -1),)
    roots = {cast("str", path): root for path, root, _ in pairs}
    changed = _touched(checkpoint, plan, roots)
    indexes = _new_indexes(listing, storages, roots, changed)
    gone = files_of(checkpoint, listing, {part.name for part in checkpoint.parts} - roots.keys())
    gone |= checkpoint.repeated if changed else set()  # they would no longer repeat what has changed
    removed = with_links(listing, gone.union(path for path, data in indexes.items() if not data))
    return KeptFiles(roots, changed, indexes, removed)


def _touched(checkpoint: OpenCheckpoint, plan: MovePlan, roots: Mapping[str, Value]) -> frozenset[str]:
    """Paths of the checkpoint files that change or are removed."""
    return frozenset(
        part.name
        for part in checkpoint.parts
        if part.name not in roots or _is_touched(part.name, plan) or has_unreached(part, plan)
    )


def _is_touched(path: str, plan: MovePlan) -> bool:
    """Whether a plan changes anything in a file."""
    storages = (*(edit.storage for edit in plan.edits), *(one.storage for one in plan.trimmed))
    places = (
        *(one.where for one in plan.renamed),
        *(one.where for one in plan.replaced),
        *(one.where for one in plan.flags),
        *(one.name for one in plan.dropped),
    )
    return any(key.startswith(f"{path}/" if path else "") for key in storages) or any(
        not path or place == path or place.startswith(f"{path}.") for place in places
    )


def has_unreached(part: OpenPart, plan: MovePlan) -> bool:
    """Whether ``--compact`` leaves out bytes of a part that no tensor reaches, or stores deflated ones plainly."""
    return plan.request.remap.compact and any(fact.kind in _UNREACHED for fact in part.inventory.facts)


def _new_indexes(
    listing: Listing, storages: Sequence[StorageRef], roots: Mapping[str, Value], changed: frozenset[str]
) -> dict[str, bytes]:
    """The new content of each index whose shards change; empty if no key is left."""
    found: dict[str, bytes] = {}
    for file in listing.files:
        if file.is_hidden or not is_index(file.name):
            continue
        prefix = f"{file.folder}/" if file.folder else ""
        index = json.loads(b"".join(bytes(block) for block in listing.contents(file.path)))  # checked when it was read
        names = dict.fromkeys(index["weight_map"].values())
        if changed.isdisjoint({prefix + name for name in names}):
            continue
        trees = ((name, as_dict(roots.get(prefix + name))) for name in names)
        left = {key: name for name, pairs in trees if pairs is not None for key in string_keys(pairs)}
        index["weight_map"] = dict(sorted(left.items()))
        if "total_size" in (index.get("metadata") or {}):
            inside = tuple(f"{prefix}{name}/" for name in names)
            index["metadata"]["total_size"] = sum(one.nbytes for one in storages if one.key.startswith(inside))
        found[file.path] = json.dumps(index, indent=2).encode() + b"\n" if left else b""
    return found


def with_links(listing: Listing, gone: Iterable[str]) -> frozenset[str]:
    """Paths that are left out, with the links to them, and the folders that become empty."""
    folders = (folder.path for folder in listing.folders if folder.path)
    members = Counter(dirname(path) for path in (*listing.names, *folders))
    links: dict[str, list[str]] = {}
    for link in listing.links:
        links.setdefault(link.leads_to, []).append(link.path)
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
    """Paths that a directory of new shards leaves out: checkpoints, indexes, and links to them but for new names.

    Of an archive, files outside of its top folder are left out too, and those that macOS adds for other files.
    """
    gone = files_of(checkpoint, listing, {part.name for part in checkpoint.parts}) | checkpoint.repeated
    gone |= {file.path for file in listing.files if is_index(file.name) or not file.path.startswith(checkpoint.top)}
    gone |= {file.path for file in listing.files if file.is_hidden and "/." not in f"/{file.folder}"}
    return gone | with_links(listing, gone.difference(new))
