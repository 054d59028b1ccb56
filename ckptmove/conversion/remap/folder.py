"""Lay out the changed files of a directory or an archive that keeps its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.parts import FilePart
from ckptmove.conversion.remap.errors import NotRemappable
from ckptmove.conversion.remap.indexes import new_indexes
from ckptmove.conversion.remap.new_files import NewFiles, has_unreached
from ckptmove.io.contracts import BytesSegment, FromSource
from ckptmove.io.locations import stem

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        changed = touched(checkpoint, remapped, roots)
        indexes = new_indexes(listing, remapped, roots, changed)
        self.segments: dict[str, tuple[Segment, ...]] = {}
        for path in changed & roots.keys():
            self.segments[path] = self._lay_out(parts[path], roots[path])
        self.segments |= {path: (BytesSegment(data),) for path, data in indexes.items() if data}
        self.removed = (parts.keys() - roots.keys()) | {path for path, data in indexes.items() if not data}

    def _lay_out(self, part: OpenPart, root: Value) -> tuple[Segment, ...]:
        if not isinstance(part, FilePart):
            raise NotRemappable(part.path, part.inventory.container, "each rank wrote its own pieces")
        if part.inventory.container == "safetensors":
            return self._files.safetensors_file(root)
        own = self._files.same_format(part, root)
        if own is None:
            return self._files.torch_file(root, stem(part.name))
        return tuple(FromSource(part.source, segment) for segment in own)


def touched(checkpoint: OpenCheckpoint, remapped: Remapped, roots: Mapping[str, Value]) -> frozenset[str]:
    """Paths of the checkpoint files that change or are removed."""
    plan = remapped.plan
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
