"""An archive of files as a listing, like that of a directory.

Never knows a format: zip and tar have rooms of their own.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ckptmove.layouts.listing import DiskPlace, Listing, stamp_of
from ckptmove.layouts.members import full_path
from ckptmove.layouts.tar_members import TarMembers
from ckptmove.layouts.zip_members import ZipMembers
from ckptmove.streams.source import open_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.contracts import ByteSource
    from ckptmove.directories import ArchiveForm
    from ckptmove.layouts.listing import ListedFile, Stamp
    from ckptmove.layouts.members import Members
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, ContainerName

_ZIP: Final = b"PK"
_DESCRIBED: Final[dict[ArchiveForm, str]] = {"zip": "a zip archive without data.pkl", "tar": "a tar archive"}
_SHARD: Final = ".distcp"


@dataclass(frozen=True, slots=True)
class ArchiveListing(Listing):
    """The files of an open archive; folders and links in it pass as they are.

    Attributes:
        members: the archive.
        stamp: of its file, when it was opened.
    """

    members: Members
    stamp: Stamp

    @property
    def size_bytes(self) -> int:
        """Size of the archive."""
        return self.members.source.size

    @property
    def container(self) -> ContainerName:
        """What holds the files, in the public contract."""
        return "archive"

    @property
    def form(self) -> ArchiveForm:
        """What the archive is."""
        return self.members.form

    @property
    def described(self) -> str:
        """The same for people."""
        return _DESCRIBED[self.members.form]

    @property
    def has_checksums(self) -> bool:
        """Whether it holds a CRC of each member."""
        return self.members.has_checksums

    def full(self, path: str) -> str:
        """How a member is named to people; a name in an archive may be absolute."""
        return full_path(self.path, path)

    def look(self, path: str) -> None:
        """Refuse a member that is seen without opening it to be no checkpoint."""
        self.members.look(path)

    def open(self, path: str) -> ByteSource:
        """The bytes of a member; errors as of :meth:`ckptmove.layouts.members.Members.open`."""
        return self.members.open(path)

    def disk(self, file: ListedFile) -> DiskPlace | None:
        """Where the bytes of a member lie in the archive; None where they are compressed."""
        span = self.members.span(file.path)
        return None if span is None else DiskPlace(self.path, span.start, self.stamp)

    def read_from(self, files: Iterable[ListedFile]) -> tuple[DiskPlace, ...]:
        """What has to stay as it is for some of the members to be what they are: the archive."""
        del files
        return (DiskPlace(self.path, 0, self.stamp),)

    def contents(self, path: str) -> Iterator[bytes | memoryview]:
        """The bytes of a member block by block, inflated where they are compressed."""
        return self.members.contents(path)

    def require_unchanged(self, file: ListedFile) -> None:
        """Nothing: the archive is open, and its members are what they were."""

    def expression(self, path: str) -> str:
        """Python that opens a member."""
        return self.members.expression(path)

    def flaws(self, path: str) -> tuple[ArchiveFact, ...]:
        """What is amiss with the bytes of a member, by its CRC."""
        return self.members.flaws(path)


@contextmanager
def open_archive(path: str, limits: Limits) -> Iterator[ArchiveListing]:
    """List the members of a zip or a tar, and hold it open.

    Args:
        path: a file that is one of the two.
        limits: what it may ask for.

    Raises:
        MissingFile, AccessFailed, SourceChanged, DamagedArchive, LimitExceeded: as they say.
        MustBeUnpacked: one of its members cannot be read where it lies.
    """
    source = open_source(path)
    stamp = stamp_of(os.fstat(source.fileno()))
    try:
        form = ZipMembers if source.read(0, min(len(_ZIP), source.size)) == _ZIP else TarMembers
        members: Members = form(source, limits)
        if any(file.name.endswith(_SHARD) and not file.is_hidden for file in members.files):
            raise members.refusal(f"a distributed checkpoint lies in it (*{_SHARD})")
        yield ArchiveListing(path, members.files, (), (), members, stamp)
    finally:
        source.close()
