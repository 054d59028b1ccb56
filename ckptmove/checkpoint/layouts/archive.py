"""An archive of files as a listing, like that of a directory.

Never knows a format: zip and tar have rooms of their own. Never looks further than into the members of a member.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.layouts.members import full_path
from ckptmove.checkpoint.layouts.tar_members import TarMembers
from ckptmove.checkpoint.layouts.zip_members import ZipMembers
from ckptmove.errors import ArchiveOfFiles, CrcMismatch, DamagedArchive, LimitExceeded, MustBeUnpacked, NotACheckpoint
from ckptmove.formats.sniff import gunzipped, recognise
from ckptmove.io.listing import Listing
from ckptmove.io.part import MemorySource
from ckptmove.io.source import DiskPlace
from ckptmove.model import ArchiveFact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ckptmove.checkpoint.layouts.members import Members
    from ckptmove.io.contracts import ByteSource
    from ckptmove.io.listing import ListedFile
    from ckptmove.io.source import FileSource, Stamp
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveForm, ContainerName

_ZIP: Final = b"PK"
_DESCRIBED: Final[dict[ArchiveForm, str]] = {"zip": "a zip archive without data.pkl", "tar": "a tar archive"}
_CUT: Final = " without its end, behind which members may be cut off"
_SHARD: Final = ".distcp"
_FORMS: Final[dict[ArchiveForm, type[ZipMembers | TarMembers]]] = {"zip": ZipMembers, "tar": TarMembers}
#: What :func:`ckptmove.formats.sniff.recognise` says of files that hold others, or another: those that can be
#: inflated here, and those that cannot, of which the name has to tell whether a single file in them is of interest.
_GZIPPED: Final = frozenset({"a gzip file", "a tar archive in a gzip file"})
_SEALED: Final = frozenset({"a 7z archive", "a rar archive"})
_SEALED_FILE: Final = frozenset({"a bzip2 file", "an xz file", "a zstd file"})
_OF_INTEREST: Final = re.compile(r"\.(?:tar|tbz2?|txz|tzst|zip|pth?|ckpt|bin|safetensors|nemo)\b")
#: So much of what is compressed is looked at.
_LOOK: Final = 1 << 20


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
        """The same for people, and whether its end is missing."""
        return _DESCRIBED[self.members.form] + (_CUT if self.members.facts else "")

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
        """The bytes of a member; errors as of :meth:`ckptmove.checkpoint.layouts.members.Members.open`."""
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


def list_archive(source: FileSource, limits: Limits) -> ArchiveListing:
    """List the members of a zip or a tar.

    Args:
        source: its bytes; the caller closes them.
        limits: resource limits for reading it.

    Raises:
        SourceChanged, AccessFailed, DamagedArchive, LimitExceeded: if it is unreadable.
        MustBeUnpacked: if a member cannot be read inside of the archive.
    """
    members = _FORMS["zip" if source.read(0, min(len(_ZIP), source.size)) == _ZIP else "tar"](source, limits)
    if any(file.name.endswith(_SHARD) and not file.is_hidden for file in members.files):
        raise members.refusal(f"a distributed checkpoint lies in it (*{_SHARD})")
    return ArchiveListing(source.path, members.files, (), (), members, source.place.stamp)


def standing_facts(listing: Listing) -> tuple[ArchiveFact, ...]:
    """What is amiss with an archive itself; nothing of a directory."""
    return listing.members.facts if isinstance(listing, ArchiveListing) else ()


def limits_of(listing: Listing, path: str, limits: Limits) -> Limits:
    """What a file may ask for: less, where it is a compressed member of an archive."""
    return listing.members.limits(path, limits) if isinstance(listing, ArchiveListing) else limits


def inner_archives(
    listing: Listing, file: ListedFile, error: NotACheckpoint, limits: Limits
) -> tuple[ArchiveFact, ...]:
    """A member of an archive, where it is an archive itself and checkpoints may be in it.

    It goes by the first bytes of each of its own members, and no further: an archive in there counts as a checkpoint.
    Arrays of numpy and office documents are zips of something else. Where that cannot be seen without unpacking it,
    nobody knows what is in it, and it counts, too.

    Args:
        listing: what the member is in; in a directory, every archive can be named by itself.
        file: the member.
        error: what it is, since it is no checkpoint.
        limits: what an archive may ask for.
    """
    if not isinstance(listing, ArchiveListing):
        return ()
    try:
        counts = _may_hold_some(listing, file.path, error, limits)
    except (CrcMismatch, DamagedArchive, LimitExceeded, MustBeUnpacked):
        counts = True
    return (ArchiveFact("inner-archive", file.path, file.size_bytes),) if counts else ()


def _may_hold_some(listing: ArchiveListing, path: str, error: NotACheckpoint, limits: Limits) -> bool:
    if isinstance(error, ArchiveOfFiles):
        # Of a compressed zip the end was needed to know it for one; of a compressed tar only the beginning is at hand.
        is_at_hand = error.form == "zip" or listing.members.span(path) is not None
        source = listing.open(path) if is_at_hand else MemorySource(path, _beginning(listing, path))
        return _lists_one(source, error.form, limits)
    if error.found in _GZIPPED:
        data = gunzipped(_beginning(listing, path), _LOOK)
        return data is None or _is_one(MemorySource(path, data), limits)
    is_named_so = error.found in _SEALED_FILE and _OF_INTEREST.search(path) is not None
    return is_named_so or error.found in _SEALED


def _beginning(listing: ArchiveListing, path: str) -> bytes:
    """The first bytes of a member, inflated where it is compressed."""
    return bytes(next(listing.contents(path)))


def _is_one(source: ByteSource, limits: Limits) -> bool:
    try:
        recognise(source)
    except ArchiveOfFiles as error:
        return _lists_one(source, error.form, limits)
    except NotACheckpoint:
        return False
    return True


def _lists_one(source: ByteSource, form: ArchiveForm, limits: Limits) -> bool:
    members = _FORMS[form](source, limits)
    # Without its end, which is said of it here, there may have been more members than those that are seen.
    return bool(members.facts) or any(
        _begins_as_one(members, file.path) for file in members.files if not file.is_hidden
    )


def _begins_as_one(members: Members, path: str) -> bool:
    span = members.span(path)
    try:
        if span is None:
            members.look(path)
        else:
            recognise(members.part(path, span))
    except ArchiveOfFiles:
        return True
    except NotACheckpoint:
        return False
    return True
