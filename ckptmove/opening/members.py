"""Base class for archives of files: members as byte sources, and segments of a changed archive.

No member is written to a file: its name could be any path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final, cast

from ckptmove.errors import MustBeUnpacked
from ckptmove.io.listing import ListedFile, Listing
from ckptmove.io.locations import leads_out
from ckptmove.io.part import PartSource
from ckptmove.io.source import DiskPlace
from ckptmove.model import ArchiveFact

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.io.source import FileSource, Stamp
    from ckptmove.model import ArchiveForm, Span

#: Names that macOS adds for every file of an archive.
_APPLE_FOLDER: Final = "__MACOSX"
_APPLE_FILE: Final = "._"
#: Forms in words.
_DESCRIBED: Final[dict[ArchiveForm, str]] = {"zip": "a zip archive without data.pkl", "tar": "a tar archive"}
#: Permission bits that give a program the rights of the owner or the group of its file.
_SET_ID: Final = 0o6000
_CUT: Final = " that is cut off, so members may be missing"


class Members(Listing, ABC):
    """The files of an open archive; its folders and links are copied unchanged."""

    container = "archive"
    form: ClassVar[ArchiveForm]
    source: ByteSource
    _facts: tuple[ArchiveFact, ...] = ()

    @property
    def size_bytes(self) -> int:
        return self.source.size

    @property
    def facts(self) -> tuple[ArchiveFact, ...]:
        return self._facts

    @property
    def described(self) -> str:
        """Its format in words, and whether its end is missing."""
        return _DESCRIBED[self.form] + (_CUT if self.is_cut else "")

    @property
    def is_cut(self) -> bool:
        """Whether its end is missing."""
        return any(fact.kind == "missing-end" for fact in self.facts)

    def full(self, path: str) -> str:
        """Path of a member as users see it; a name in an archive may be absolute."""
        return full_path(self.path, path)

    def disk(self, file: ListedFile) -> DiskPlace | None:
        span = self.span(file.path)
        return None if span is None or self.source.is_remote else DiskPlace(self.path, span.start, self._stamp)

    def read_from(self, files: Iterable[ListedFile]) -> tuple[DiskPlace, ...]:
        del files
        return () if self.source.is_remote else (DiskPlace(self.path, 0, self._stamp),)

    def require_unchanged(self, file: ListedFile) -> None:
        """Do nothing: the archive is open."""

    @property
    def _stamp(self) -> Stamp:
        return cast("FileSource", self.source).place.stamp  # of an archive that is no member itself

    @abstractmethod
    def span(self, path: str) -> Span | None:
        """Span of a member; None if it is compressed."""

    @abstractmethod
    def lay_out(self, changed: Mapping[str, Sequence[Segment]], removed: Collection[str]) -> tuple[Segment, ...]:
        """Segments of the archive with some members changed or left out, and everything else unchanged.

        ``changed`` has segments of this archive's source by the path of the member; ``removed`` the paths of members
        and folders.
        """

    def listed(self, members: Sequence[tuple[str, int]]) -> tuple[ListedFile, ...]:
        """Members, given by name and size, as the files of a directory, by path.

        The names may begin with ``./``, as those of ``tar -c .`` do.
        """
        files: dict[str, ListedFile] = {}
        for place, (name, nbytes) in enumerate(members):
            path = shown_path(name)
            if path in files:
                raise self.refusal(f"two of its members are named '{path:.80}'")
            *folders, last = path.split("/")
            is_hidden = last.startswith(_APPLE_FILE) or any(
                folder == _APPLE_FOLDER or (folder.startswith(".") and folder.strip(".") != "") for folder in folders
            )
            # Members of an open archive do not change, so the place of a member identifies it.
            files[path] = ListedFile(path, nbytes, 0, (place, nbytes, 0, 0), is_hidden)
        return tuple(sorted(files.values(), key=lambda file: file.path))

    def refusal(self, detail: str, *, locked: bool = False) -> MustBeUnpacked:
        """The error for an archive that must be unpacked first, or needs a password."""
        return MustBeUnpacked(self.source.path, detail, self.form, locked=locked)

    def part(self, path: str, span: Span) -> PartSource:
        """A span of the archive, as the source of a member."""
        source = PartSource(self.source, span)
        source.path = full_path(self.source.path, path)
        return source


def unsafe_member(
    name: str, nbytes: int, mode: int, target: str = "", *, is_special: bool = False
) -> tuple[ArchiveFact, ...]:
    """A fact about a member that is not safe to unpack, if it is not.

    Args:
        name: its name as written.
        mode: its permission bits; 0 for a folder, in which setgid only chooses the group of new files.
        is_special: whether it is a device or a pipe.
    """
    if leads_out(name) or leads_out(target):
        return (ArchiveFact("outside-member", shown_path(name), nbytes, name),)
    if is_special or mode & _SET_ID:
        return (ArchiveFact("special-member", shown_path(name), nbytes, name),)
    return ()


def full_path(archive: str, path: str) -> str:
    """Path of a member as users see it, with the path of its archive."""
    return f"{archive}/{path}"


def shown_path(name: str) -> str:
    """Path of a member as users see it in the archive: its name without leading ``./``."""
    while name.startswith("./"):
        name = name[2:]
    return name
