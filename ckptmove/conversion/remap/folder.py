"""Lay out the changed files of a directory or an archive that keeps its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.parts import FilePart
from ckptmove.conversion.remap.errors import NotRemappable
from ckptmove.conversion.remap.new_files import NewFiles
from ckptmove.formats.facts import facts_of
from ckptmove.io.contracts import BytesSegment, FromSource
from ckptmove.io.locations import stem

if TYPE_CHECKING:
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.conversion.conversion import Conversion
    from ckptmove.conversion.remap.kept_files import KeptFiles
    from ckptmove.conversion.remap.remapping import Remapped
    from ckptmove.io.contracts import Segment
    from ckptmove.pickles.tree import Value


class RemappedFolder:
    """The changed files of a directory or an archive.

    Attributes:
        segments: segments of the files that change, by path.
        removed: paths of the files, links and folders that are left out.
    """

    def __init__(self, conversion: Conversion, remapped: Remapped, checkpoint: OpenCheckpoint) -> None:
        self._files = NewFiles(remapped, conversion)
        kept = cast("KeptFiles", remapped.kept)
        parts = {part.name: part for part in checkpoint.parts}
        self.segments: dict[str, tuple[Segment, ...]] = {}
        for path in kept.changed & kept.roots.keys():
            self.segments[path] = self._lay_out(parts[path], kept.roots[path])
        self.segments |= {path: (BytesSegment(data),) for path, data in kept.indexes.items() if data}
        self.removed = kept.removed

    def _lay_out(self, part: OpenPart, root: Value) -> tuple[Segment, ...]:
        if not isinstance(part, FilePart):
            raise NotRemappable(part.path, part.inventory.container, "each rank wrote its own pieces")
        if facts_of(part.inventory.container).is_table:
            return self._files.safetensors_file(root)
        own = self._files.same_format(part, root)
        if own is None:
            return self._files.torch_file(root, stem(part.name))
        return tuple(FromSource(part.source, segment) for segment in own)
