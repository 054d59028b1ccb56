"""List an archive of files like a directory, and find archives among its members."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.layouts.members import Members
from ckptmove.checkpoint.layouts.tar_members import TarMembers
from ckptmove.checkpoint.layouts.zip_members import ZipMembers
from ckptmove.errors import ArchiveOfFiles, CrcMismatch, DamagedArchive, LimitExceeded, MustBeUnpacked, NotACheckpoint
from ckptmove.formats.opening import gunzipped, recognise
from ckptmove.io.part import MemorySource
from ckptmove.model import ArchiveFact

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource
    from ckptmove.io.listing import ListedFile, Listing
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveForm

_ZIP: Final = b"PK"
_SHARD: Final = ".distcp"
_FORMS: Final[dict[ArchiveForm, type[ZipMembers | TarMembers]]] = {"zip": ZipMembers, "tar": TarMembers}
#: Names that :func:`ckptmove.formats.opening.recognise` gives to compressed files: those that can be inflated here, and
#: those that cannot. For a single compressed file, its name decides whether it may be a checkpoint.
_GZIPPED: Final = frozenset({"a gzip file", "a tar archive in a gzip file"})
_SEALED: Final = frozenset({"a 7z archive", "a rar archive"})
_SEALED_FILE: Final = frozenset({"a bzip2 file", "an xz file", "a zstd file"})
_OF_INTEREST: Final = re.compile(r"\.(?:tar|tbz2?|txz|tzst|zip|pth?|ckpt|bin|safetensors|nemo)\b")
#: Bytes of a compressed file that are read to detect its content.
_LOOK: Final = 1 << 20


def list_archive(source: ByteSource, limits: Limits) -> Members:
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
        raise members.refusal(f"it contains a distributed checkpoint (*{_SHARD})")
    return members


def inner_archives(
    listing: Listing, file: ListedFile, error: NotACheckpoint, limits: Limits
) -> tuple[ArchiveFact, ...]:
    """Report a member that is an archive itself and may contain checkpoints.

    The first bytes of each of its own members decide, and a nested archive counts as a checkpoint. Arrays of numpy and
    office documents are zips without checkpoints. An archive whose content is unknown without unpacking counts too.

    Args:
        listing: listing of the member; in a directory, users can name every archive themselves.
        file: the member.
        error: why it is not a checkpoint.
        limits: resource limits for reading an archive.
    """
    if not isinstance(listing, Members):
        return ()
    try:
        counts = _may_hold_some(listing, file.path, error, limits)
    except (CrcMismatch, DamagedArchive, LimitExceeded, MustBeUnpacked):
        counts = True
    return (ArchiveFact("inner-archive", file.path, file.size_bytes),) if counts else ()


def _may_hold_some(listing: Members, path: str, error: NotACheckpoint, limits: Limits) -> bool:
    if isinstance(error, ArchiveOfFiles):
        # To detect it, a compressed zip was inflated completely, but a compressed tar only at its beginning.
        is_whole = error.form == "zip" or listing.span(path) is not None
        source = listing.open(path) if is_whole else MemorySource(path, _beginning(listing, path))
        return _lists_one(source, error.form, limits)
    if error.found in _GZIPPED:
        data = gunzipped(_beginning(listing, path), _LOOK)
        return data is None or _is_one(MemorySource(path, data), limits)
    is_named_so = error.found in _SEALED_FILE and _OF_INTEREST.search(path) is not None
    return is_named_so or error.found in _SEALED


def _beginning(listing: Members, path: str) -> bytes:
    """The first bytes of a member, inflated if it is compressed."""
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
    # If the end is missing, more members may have existed.
    return members.is_cut or any(_begins_as_one(members, file.path) for file in members.files if not file.is_hidden)


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
