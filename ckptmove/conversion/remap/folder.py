"""Lay out the changed files of a directory or an archive that keeps its files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.checkpoint.layouts.detect import is_index
from ckptmove.checkpoint.parts import FilePart
from ckptmove.conversion.remap.errors import NotRemappable
from ckptmove.conversion.remap.new_files import NewFiles, has_unreached
from ckptmove.io.contracts import BytesSegment
from ckptmove.io.locations import stem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.conversion.conversion import Conversion
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.io.contracts import Segment
    from ckptmove.io.listing import Listing
    from ckptmove.moves import MovePlan
    from ckptmove.pickles.tree import Dict, Value


class RemappedFolder:
    """The changed files of a directory or an archive.

    Attributes:
        segments: segments of the files that change, by path.
        removed: paths of checkpoint files of which nothing is left, and of the indexes of removed shards.
    """

    def __init__(self, conversion: Conversion, remapped: Remapped, checkpoint: OpenCheckpoint) -> None:
        """Lay out the files.

        Raises:
            NotRemappable: if a distributed checkpoint, which cannot be written, would change.
            DamagedArchive, Refused: as of :class:`ckptmove.conversion.remap.new_files.NewFiles`.
        """
        self._files = NewFiles(remapped, conversion)
        self._remapped = remapped
        listing = cast("Listing", checkpoint.listing)
        pairs = cast("Dict", remapped.root).pairs() if not checkpoint.is_whole else ((("", remapped.root, -1)),)
        roots = {cast("str", path): root for path, root, _ in pairs}
        parts = {part.name: part for part in checkpoint.parts}
        self.segments: dict[str, tuple[Segment, ...]] = {}
        for path, part in parts.items():
            if path in roots and (_is_touched(path, remapped.plan) or has_unreached(part, remapped.plan)):
                self.segments[path] = self._lay_out(part, roots[path])
        self.removed = frozenset(parts) - frozenset(roots)
        self._write_indexes(listing, roots)

    def _lay_out(self, part: OpenPart, root: Value) -> tuple[Segment, ...]:
        if not isinstance(part, FilePart):
            reason = "each rank wrote its own pieces; write one file instead, --output X.pth"
            raise NotRemappable(part.path, part.inventory.container, reason)
        if part.inventory.container == "safetensors":
            return self._files.safetensors_file(root)
        return self._files.same_format(part, root) or self._files.torch_file(root, stem(part.name))

    def _write_indexes(self, listing: Listing, roots: dict[str, Value]) -> None:
        """Write the indexes of shards anew, with the keys that are left."""
        for file in listing.files:
            if file.is_hidden or not is_index(file.name):
                continue
            prefix = f"{file.folder}/" if file.folder else ""
            index = json.loads(listing_text(listing, file.path))  # it was checked when the directory was read
            names = dict.fromkeys(index["weight_map"].values())
            if not any(prefix + name in self.segments or prefix + name in self.removed for name in names):
                continue
            left = {key: name for name in names for key in _keys(roots.get(prefix + name))}
            if not left:
                self.removed |= {file.path}
                continue
            index["weight_map"] = dict(sorted(left.items()))
            if "total_size" in (index.get("metadata") or {}):
                index["metadata"]["total_size"] = self._nbytes(prefix, names)
            self.segments[file.path] = (BytesSegment(json.dumps(index, indent=2).encode() + b"\n"),)

    def _nbytes(self, prefix: str, names: dict[str, None]) -> int:
        inside = tuple(f"{prefix}{name}/" for name in names)
        return sum(one.nbytes for one in self._remapped.inventory.storages if one.key.startswith(inside))


def listing_text(listing: Listing, path: str) -> bytes:
    """All bytes of a small file."""
    return b"".join(bytes(block) for block in listing.contents(path))


def _keys(root: Value) -> Iterator[str]:
    pairs = as_dict(root)
    for key in pairs.keys() if pairs is not None else ():  # no mapping
        if type(key) is str:
            yield key


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
