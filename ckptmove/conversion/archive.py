"""An archive of checkpoints, moved into a new one: whole, or not at all.

Never unpacks it, and never changes the order, the names or the dates of its members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.checkpoint.layouts import zip_members
from ckptmove.checkpoint.layouts.archive import open_archive
from ckptmove.checkpoint.layouts.merge import split_plan
from ckptmove.checkpoint.layouts.reading import read_listing
from ckptmove.checkpoint.opening import naming, open_checkpoint
from ckptmove.conversion.file import Conversion, lay_out, require_output
from ckptmove.errors import CrcMismatch
from ckptmove.io.contracts import BytesSegment
from ckptmove.io.rewrite import write_segments
from ckptmove.io.segments import blocks_of, length, shifted, without_checks
from ckptmove.io.sink import FileSink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.checkpoint.layouts.archive import ArchiveListing
    from ckptmove.conversion.file import ConvertRequest
    from ckptmove.io.contracts import Segment
    from ckptmove.moves import ConvertResult, MovePlan


def convert_archive(request: ConvertRequest) -> ConvertResult:
    """Plan the conversion of an archive and carry it out.

    Errors as of :func:`ckptmove.api.convert`. Members that are no checkpoints are copied byte for byte.
    """
    path = request.path
    with naming(path), open_archive(path, request.limits) as listing:
        archive = read_listing(listing, request.limits)
        conversion = Conversion(request, archive.inventory, archive.no_devices)
        if not conversion.is_writing:
            return conversion.result()
        require_output(request)
        overflowed = conversion.overflowed.append
        changes = _Changes(listing, request, overflowed)
        for part, own in zip(archive.parts, split_plan(conversion.plan, archive.parts), strict=True):
            changes.add(part.file.path, own)
        with FileSink(request.target, force=request.force) as sink:
            members = listing.members
            segments = members.lay_out(changes.segments)
            if not request.check:
                segments = without_checks(segments)
            written = write_segments(members.source, segments, sink, path, request.progress, overflowed)
            sink.commit(request.settle)
    if changes.unchecked:
        unchecked = ", ".join(changes.unchecked)
        conversion.notes.append(f"without CRCs, so that their bytes were copied unchecked: {unchecked}")
    if changes.inflated:
        inflated = ", ".join(changes.inflated)
        conversion.notes.append(f"compressed in the old archive, and plainly stored in the new one: {inflated}")
    return conversion.result(written)


class _Changes:
    """The new bytes of checkpoints in an archive.

    Attributes:
        segments: of the archive's source, by the path of the member that they make up.
        unchecked: paths of the checkpoints whose bytes have no CRCs.
        inflated: paths of those that were compressed, and are not any more.
    """

    def __init__(self, listing: ArchiveListing, request: ConvertRequest, overflowed: Callable[[int], None]) -> None:
        self._listing = listing
        self._request = request
        self._overflowed = overflowed
        self._held = 0
        self.segments: dict[str, Sequence[Segment]] = {}
        self.unchecked: list[str] = []
        self.inflated: list[str] = []

    def add(self, path: str, plan: MovePlan) -> None:
        """Lay out a checkpoint as its plan has it; one that does not change is left to the CRC of the archive."""
        members = self._listing.members
        if plan.is_empty and members.has_checksums:
            return
        source = self._listing.open(path)
        with open_checkpoint(self._listing.full(path), self._request.limits, source) as checkpoint:
            span = members.span(path)
            if self._request.check and not checkpoint.container.has_checksums() and span is not None:
                self._check(path)
            segments = lay_out(checkpoint, plan, self._request)
            if span is not None:
                self.segments[path] = tuple(shifted(segment, span.start, f"{path}/") for segment in segments)
            else:
                self._hold(path, sum(map(length, segments)))
                data = b"".join(blocks_of(source, segments, self._overflowed))
                self.segments[path] = (BytesSegment(data),)
                self.inflated.append(path)

    def _hold(self, path: str, nbytes: int) -> None:
        """Count bytes that stay in memory until all is written; what was compressed twice may come to any number."""
        self._held += nbytes
        if self._held > zip_members.MOST_INFLATED_BYTES:
            detail = f"member '{path:.80}' is compressed, and too large to move in memory ({nbytes:,} bytes)"
            raise self._listing.members.refusal(detail)

    def _check(self, path: str) -> None:
        """Compare a checkpoint that has no CRCs of its own with that of the archive."""
        if not self._listing.members.has_checksums:
            self.unchecked.append(path)
        elif self._listing.flaws(path):
            raise CrcMismatch(self._listing.path, path)
