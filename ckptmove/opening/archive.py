"""List an archive of files like a directory, and find archives among the files of both."""

from __future__ import annotations

import re
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.parts import dangerous_names
from ckptmove.errors import ArchiveOfFiles, CrcMismatch, DamagedArchive, LimitExceeded, MustBeUnpacked, NotACheckpoint
from ckptmove.formats.enclosed_pickle import NUMPY, gunzipped
from ckptmove.formats.opening import recognise
from ckptmove.io.part import MemorySource
from ckptmove.opening.members import Members
from ckptmove.opening.tar_members import TarMembers
from ckptmove.opening.zip_members import ZipMembers

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
_SEALED_FILE: Final = frozenset({"a bzip2 file", "an xz file", "a zstd file", "a zlib file"})
_OF_INTEREST: Final = re.compile(
    r"\.(?:tar|tgz|tbz2?|txz|tzst|zip|7z|rar|pth?|ckpt|bin|safetensors|nemo|pkl|pickle|joblib)\b"
)
#: Errors of an archive, or of a member, that cannot be read here.
_UNREAD: Final = (CrcMismatch, DamagedArchive, LimitExceeded, MustBeUnpacked)
#: Bytes of a compressed file that are read to detect its content.
_LOOK: Final = 1 << 20


def list_archive(source: ByteSource, limits: Limits) -> Members:
    """List the members of a zip or a tar. The caller closes its source."""
    members = _FORMS["zip" if source.read(0, min(len(_ZIP), source.size)) == _ZIP else "tar"](source, limits)
    if any(file.name.endswith(_SHARD) and not file.is_hidden for file in members.files):
        raise members.refusal(f"it contains a distributed checkpoint (*{_SHARD})")
    return members


class Inside(NamedTuple):
    """What an archive or a compressed file holds."""

    is_unread: bool  # whether it may hold checkpoints, which are not read
    holds_pickle: bool = False  # whether a member holds a pickle that is no checkpoint
    runs: tuple[str, ...] = ()  # dangerous names in such pickles


def look_inside(listing: Listing, file: ListedFile, error: NotACheckpoint, limits: Limits) -> Inside:
    """Look into a file that is an archive, or compressed, and may contain checkpoints.

    The first bytes of each of its own members decide, and a nested archive counts as a checkpoint. Arrays of numpy and
    office documents are zips without checkpoints. An archive whose content is unknown without unpacking counts too. Of
    the archives in a directory, only arrays are looked at: users can name every other one themselves.
    """
    try:
        if isinstance(listing, Members) or _holds_arrays(listing, file, error, limits):
            return _inside(listing, file.path, error, limits)
    except _UNREAD as unread:
        # numpy.load is more lenient: it reads what precedes the damage, and ignores what no array needs.
        is_zip = isinstance(error, ArchiveOfFiles) and error.form == "zip"
        return Inside(is_unread=True, runs=unread.runs or (_dangerous_names(listing, file, limits) if is_zip else ()))
    is_packed = isinstance(error, ArchiveOfFiles) or error.found in _GZIPPED | _SEALED | _SEALED_FILE
    return Inside(is_packed and _OF_INTEREST.search(file.name) is not None)


def _dangerous_names(listing: Listing, file: ListedFile, limits: Limits) -> tuple[str, ...]:
    try:
        with closing(listing.open(file.path)) as source:
            return dangerous_names(source, limits)
    except (CrcMismatch, MustBeUnpacked):  # a compressed member
        return ()


def _holds_arrays(listing: Listing, file: ListedFile, error: NotACheckpoint, limits: Limits) -> bool:
    """Whether a file is a zip with an array in it, whatever the names: ``numpy.load`` reads the first bytes of each."""
    if listing.is_remote or not isinstance(error, ArchiveOfFiles) or error.form != "zip":
        return False
    with closing(listing.open(file.path)) as source:
        members = ZipMembers(source, limits)
        return any(members.head(one.path, len(NUMPY)) == NUMPY for one in members.files)


def _inside(listing: Listing, path: str, error: NotACheckpoint, limits: Limits) -> Inside:
    if isinstance(error, ArchiveOfFiles):
        # To detect it, a compressed zip was inflated completely, but a compressed tar only at its beginning.
        is_whole = error.form == "zip" or not isinstance(listing, Members) or listing.span(path) is not None
        with closing(listing.open(path) if is_whole else MemorySource(path, _beginning(listing, path))) as source:
            return _members_inside(source, error.form, limits)
    if error.found in _GZIPPED:
        data = gunzipped(_beginning(listing, path), _LOOK)
        return Inside(data is None or _is_one(MemorySource(path, data), limits, is_cut=len(data) == _LOOK))
    is_named_so = error.found in _SEALED_FILE and _OF_INTEREST.search(path) is not None
    return Inside(is_named_so or error.found in _SEALED)


def _beginning(listing: Listing, path: str) -> bytes:
    """The first bytes of a member, inflated if it is compressed."""
    return bytes(next(listing.contents(path)))


def _is_one(source: ByteSource, limits: Limits, *, is_cut: bool) -> bool:
    try:
        recognise(source, is_cut=is_cut)
    except ArchiveOfFiles as error:
        return _members_inside(source, error.form, limits).is_unread
    except NotACheckpoint:
        return False
    return True


def _members_inside(source: ByteSource, form: ArchiveForm, limits: Limits) -> Inside:
    """What the members of an archive are. In hidden folders, only what runs counts: numpy.load opens every array."""
    members = _FORMS[form](source, limits)
    inside = Inside(is_unread=members.is_cut)  # of one that is cut off, more members may have existed
    for file in () if members.is_cut else members.files:
        one = _member_inside(members, file.path)
        inside = Inside(
            is_unread=inside.is_unread or (one.is_unread and not file.is_hidden),
            holds_pickle=inside.holds_pickle or one.holds_pickle,
            runs=inside.runs + one.runs,
        )
    return inside


def _member_inside(members: Members, path: str) -> Inside:
    """What a member is, by its first bytes if it is compressed."""
    span = members.span(path)
    try:
        if span is None:
            members.look(path)
        else:
            recognise(members.part(path, span))
    except ArchiveOfFiles:
        return Inside(is_unread=True)
    except NotACheckpoint as error:
        return Inside(is_unread=False, holds_pickle=error.holds_pickle, runs=error.runs)
    except _UNREAD as error:
        return Inside(is_unread=True, runs=error.runs)
    return Inside(is_unread=True)
