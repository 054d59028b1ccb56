"""Write the indexes of shards anew after their keys have changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.checkpoint.layouts.detect import is_index

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.io.listing import Listing
    from ckptmove.model import StorageRef
    from ckptmove.pickles.tree import Value


def new_indexes(
    listing: Listing, storages: Sequence[StorageRef], roots: Mapping[str, Value], changed: frozenset[str]
) -> dict[str, bytes]:
    """The new content of each index whose shards change; empty if no key is left.

    Args:
        listing: files of the checkpoint.
        storages: the storages in the new trees.
        roots: trees of the files that are left, by path.
        changed: paths of files that change or are removed.
    """
    found: dict[str, bytes] = {}
    for file in listing.files:
        if file.is_hidden or not is_index(file.name):
            continue
        prefix = f"{file.folder}/" if file.folder else ""
        index = json.loads(b"".join(bytes(block) for block in listing.contents(file.path)))  # checked when it was read
        names = dict.fromkeys(index["weight_map"].values())
        if changed.isdisjoint({prefix + name for name in names}):
            continue
        left = {key: name for name in names for key in _keys(roots.get(prefix + name))}
        index["weight_map"] = dict(sorted(left.items()))
        if "total_size" in (index.get("metadata") or {}):
            inside = tuple(f"{prefix}{name}/" for name in names)
            index["metadata"]["total_size"] = sum(one.nbytes for one in storages if one.key.startswith(inside))
        found[file.path] = json.dumps(index, indent=2).encode() + b"\n" if left else b""
    return found


def _keys(root: Value) -> Iterator[str]:
    pairs = as_dict(root)
    for key in pairs.keys() if pairs is not None else ():  # no mapping
        if type(key) is str:
            yield key
