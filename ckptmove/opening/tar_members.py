"""Read the members of a tar, and lay out a tar with some of them changed. Links are copied, not followed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.formats.head import BLOCK
from ckptmove.formats.tar_index import padded, read_to_end, resized_header
from ckptmove.io.contracts import BytesSegment, CopySegment
from ckptmove.io.segments import length
from ckptmove.model import ArchiveFact, Span
from ckptmove.opening.members import Members, shown_path, unsafe_member

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits

_BLOCK: Final = 1 << 20
#: Blocks of zeros that writers put at the end, before they pad the tar to a multiple of 10,240 bytes.
_ENDING: Final = 2


class TarMembers(Members):
    """A tar of files."""

    form = "tar"

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        self.source = source
        everything, lacking = read_to_end(source, limits)
        if lacking:
            nbytes = lacking + (_ENDING - 1) * BLOCK
            self._facts = (ArchiveFact("missing-end", "the blocks of zeros at the end of the tar", nbytes),)
        for member in everything:
            mode, is_special = 0 if member.kind == "folder" else member.mode, member.kind == "other"
            nbytes = member.span.nbytes
            self._facts += unsafe_member(member.name, nbytes, mode, member.target, is_special=is_special)
        members = [member for member in everything if member.kind not in {"folder", "other"}]
        sparse = next((member.name for member in members if member.kind == "sparse"), None)
        if sparse is not None:
            raise self.refusal(f"member '{sparse:.80}' is sparse: its holes are not in the archive")
        # Links are listed too: unpacking a link with the name of a file would replace the file.
        every = self.listed([(member.name, member.span.nbytes) for member in members])
        self._members = {shown_path(member.name): member for member in members if member.kind == "file"}
        self._links = [member for member in members if member.kind in {"link", "symlink"}]
        self._folders = [member for member in everything if member.kind == "folder"]
        super().__init__(source.path, tuple(file for file in every if file.path in self._members), (), ())

    def open(self, path: str) -> ByteSource:
        return self.part(path, self.span(path))

    def span(self, path: str) -> Span:
        return self._members[path].span

    def contents(self, path: str) -> Iterator[bytes | memoryview]:
        return self.source.blocks(self.span(path), _BLOCK)

    def lay_out(self, changed: Mapping[str, Sequence[Segment]], removed: Collection[str]) -> tuple[Segment, ...]:
        """Segments of the tar with some members changed or left out, and everything else unchanged."""
        for link in self._links:
            if link.target in removed:
                raise self.refusal(f"member '{link.name:.80}' is a link to '{link.target:.80}', which is left out")
        new = {shown_path(member.name): member for member in self._folders} | self._members
        pieces: list[Segment] = []
        position = 0
        for path in sorted(new.keys() & {*changed, *removed}, key=lambda path: new[path].header.start):
            member = new[path]
            pieces.append(CopySegment(Span(position, member.header.start)))
            if path in changed:
                nbytes = sum(map(length, changed[path]))
                header = self.source.read(member.header.start, member.header.end)
                pieces += BytesSegment(resized_header(header, nbytes)), *changed[path]
                pieces.append(BytesSegment(bytes(padded(nbytes) - nbytes)))
            position = padded(member.span.end)
        return (*pieces, CopySegment(Span(position, self.source.size)))
