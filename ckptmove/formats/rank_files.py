"""Files of ``torch.save``, one of each rank, whose DTensors are read as whole tensors.

They are no format of a file: this is the form of a checkpoint whose tensors are in several files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.errors import DistributedFile
from ckptmove.formats.contract import Container
from ckptmove.io.contracts import CopySegment
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, StorageRef


class RankFiles(Container):
    """The tree of one rank, in which every DTensor is a whole tensor."""

    name = "rank-files"
    has_devices = False
    why_no_devices = "each rank has saved its shards from its own device"

    @classmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> RankFiles:
        """Raise :class:`DistributedFile`: it is several files."""
        raise DistributedFile(source.path)

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        """Hold the file of the first rank."""
        self.source, self.limits = source, limits

    def object_pickle(self) -> bytes:
        """Empty: the tree is that of a file, changed."""
        return b""

    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Nothing: each file is checked by itself."""
        return ()

    def storage_span(self, key: str) -> Span | None:
        """None: a tensor consists of shards."""
        return None

    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The file unchanged."""
        return (CopySegment(Span(0, self.source.size)),)
