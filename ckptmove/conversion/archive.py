"""Lay out a converted archive of files. Members keep their order, names and dates."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ckptmove.checkpoint.merge import split_plan
from ckptmove.checkpoint.naming import naming
from ckptmove.conversion.remap.folder import RemappedFolder
from ckptmove.errors import CrcMismatch, Refused
from ckptmove.io.contracts import BytesSegment
from ckptmove.io.segments import blocks_of, length, shifted, without_checks
from ckptmove.moves import MovePlan
from ckptmove.opening import zip_members

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import FilePart
    from ckptmove.conversion.conversion import Conversion
    from ckptmove.io.contracts import Segment
    from ckptmove.opening.members import Members


class UnsafeMember(Refused):
    """A member of the archive is not safe to unpack, and a copy would have it too.

    Attributes:
        name: the member.
    """

    kind = "unsafe-member"

    def __init__(self, path: str, name: str) -> None:
        super().__init__(f"member '{name:.200}' is not safe to unpack (F815), and a copy would have it", path=path)
        self.name = name


def lay_out_archive(conversion: Conversion, checkpoint: OpenCheckpoint, listing: Members) -> tuple[Segment, ...]:
    """Segments of the new archive. Members that are not checkpoints are copied byte for byte."""
    changes, plan, removed = _Changes(conversion, listing), conversion.plan, frozenset[str]()
    if conversion.remapped is not None:
        new = RemappedFolder(conversion, conversion.remapped, checkpoint)
        removed = new.removed
        changes.segments.update(new.segments)
        plan = MovePlan(plan.request)  # the changed members have their moves
    require_safe(listing, removed)
    for part, own in zip(checkpoint.parts, split_plan(plan, checkpoint.parts), strict=True):
        if part.name not in changes.segments and part.name not in removed:
            changes.add(cast("FilePart", part), own)  # a distributed checkpoint in an archive is refused
    if changes.inflated:
        inflated = ", ".join(changes.inflated)
        conversion.notes.append(f"compressed in the source, stored uncompressed in the new archive: {inflated}")
    segments = listing.lay_out(changes.segments, removed)
    return segments if conversion.request.check else without_checks(segments)


def require_safe(listing: Members, removed: Collection[str] = ()) -> None:
    """Check that no member of a copy without the removed ones would be unsafe to unpack."""
    for fact in listing.facts:
        if fact.kind in {"outside-member", "special-member"} and fact.record not in removed:
            raise UnsafeMember(listing.path, fact.record)


class _Changes:
    """New content of checkpoints in an archive.

    Attributes:
        segments: segments of the archive's source that form each changed member, by its path.
        inflated: paths of members that were compressed in the old archive, and are not in the new one.
    """

    def __init__(self, conversion: Conversion, listing: Members) -> None:
        self._conversion, self._listing = conversion, listing
        self._held = 0
        self.segments: dict[str, Sequence[Segment]] = {}
        self.inflated: list[str] = []

    def add(self, part: FilePart, plan: MovePlan) -> None:
        """Lay out a checkpoint as planned; an unchanged one is copied, if the archive has CRCs to compare it with."""
        members, path = self._listing, part.name
        if plan.is_empty and members.has_checksums:
            return
        with naming(part.path), part.content() as (container, machine):
            span = members.span(path)
            if self._conversion.request.check and not part.has_own_checksums and span is not None:
                if not members.has_checksums:
                    self._conversion.unchecked.append(path)
                elif members.flaws(path):
                    raise CrcMismatch(members.path, path)
            segments = self._conversion.lay_out(container, machine, plan)
            if span is not None:
                self.segments[path] = tuple(shifted(segment, span.start, f"{path}/") for segment in segments)
            else:
                # A member that is compressed twice may inflate to any size.
                nbytes = sum(map(length, segments))
                self._held += nbytes
                if self._held > zip_members.MOST_INFLATED_BYTES:
                    detail = f"member '{path:.80}' is compressed, and too large to move in memory ({nbytes:,} bytes)"
                    raise members.refusal(detail)
                data = b"".join(map(bytes, blocks_of(container.source, segments, self._conversion.overflowed.append)))
                self.segments[path] = (BytesSegment(data),)
                self.inflated.append(path)
