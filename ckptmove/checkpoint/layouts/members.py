"""Base class for archives of files: members as byte sources, and segments of a changed archive.

No member is written to a file: its name could be any path.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final

from ckptmove.errors import MustBeUnpacked
from ckptmove.io.listing import ListedFile
from ckptmove.io.part import PartSource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, ArchiveForm, Span

#: Names that macOS adds for every file of an archive.
_APPLE_FOLDER: Final = "__MACOSX"
_APPLE_FILE: Final = "._"


class Members(ABC):
    """An open archive of files.

    Attributes:
        form: format of the archive, zip or tar.
        source: its bytes.
        files: its members that are files, by path.
        has_checksums: whether it has a CRC of each member.
        facts: facts about the archive itself.
    """

    form: ClassVar[ArchiveForm]
    source: ByteSource
    files: tuple[ListedFile, ...]
    has_checksums: ClassVar[bool]
    facts: tuple[ArchiveFact, ...] = ()

    @abstractmethod
    def look(self, path: str) -> None:
        """Raise NotACheckpoint if a quick look at the member rules out a checkpoint.

        Raises:
            NotACheckpoint: if it is not a checkpoint.
        """

    @abstractmethod
    def open(self, path: str) -> ByteSource:
        """The bytes of a member.

        Raises:
            MustBeUnpacked: if it cannot be read inside of the archive.
            CrcMismatch: if its bytes are compressed and damaged.
        """

    @abstractmethod
    def span(self, path: str) -> Span | None:
        """Span of a member; None if it is compressed."""

    def limits(self, path: str, limits: Limits) -> Limits:
        """Resource limits for a member; lower than for a file if it is compressed."""
        del path
        return limits

    @abstractmethod
    def contents(self, path: str) -> Iterator[bytes | memoryview]:
        """The bytes of a member block by block, inflated if they are compressed; each is valid until the next."""

    @abstractmethod
    def expression(self, path: str) -> str:
        """Python that opens a member for ``torch.load``."""

    @abstractmethod
    def flaws(self, path: str) -> tuple[ArchiveFact, ...]:
        """Read a member and compare it with its CRC: one ``crc-mismatch`` if it differs."""

    @abstractmethod
    def lay_out(self, changed: Mapping[str, Sequence[Segment]], removed: Collection[str]) -> tuple[Segment, ...]:
        """Segments of the archive with some members changed or left out, and everything else unchanged.

        Args:
            changed: segments of this archive's source that make up a changed member, by its path.
            removed: paths of the members and folders that are left out.

        Raises:
            CrcMismatch: if an unchanged compressed member differs from its CRC.
            MustBeUnpacked: if a link leads to a member that is left out.
        """

    def listed(self, members: Sequence[tuple[str, int]]) -> tuple[ListedFile, ...]:
        """Members as the files of a directory, by path.

        Args:
            members: name and size of each; the names may begin with ``./``, as those of ``tar -c .`` do.

        Raises:
            MustBeUnpacked: if two have the same name: tools differ in which of them they unpack.
        """
        files: dict[str, ListedFile] = {}
        for place, (name, nbytes) in enumerate(members):
            path = shown_path(name)
            if path in files:
                raise self.refusal(f"two of its members are named '{path:.80}'")
            # Members of an open archive do not change, so the place of a member identifies it.
            files[path] = ListedFile(path, nbytes, 0, (place, nbytes, 0, 0), _is_hidden(path))
        return tuple(sorted(files.values(), key=lambda file: file.path))

    def refusal(self, detail: str, *, locked: bool = False) -> MustBeUnpacked:
        """The error for an archive that must be unpacked first, or needs a password."""
        return MustBeUnpacked(self.source.path, detail, self.form, locked=locked)

    def part(self, path: str, span: Span) -> PartSource:
        """A span of the archive, as the source of a member."""
        source = PartSource(self.source, span)
        source.path = full_path(self.source.path, path)
        return source


def full_path(archive: str, path: str) -> str:
    """Path of a member as users see it, with the path of its archive."""
    return f"{archive}/{path}"


def shown_path(name: str) -> str:
    """Path of a member as users see it in the archive: its name without leading ``./``."""
    while name.startswith("./"):
        name = name[2:]
    return name


def _is_hidden(path: str) -> bool:
    *folders, last = path.split("/")
    return last.startswith(_APPLE_FILE) or any(
        folder == _APPLE_FOLDER or (folder.startswith(".") and folder.strip(".") != "") for folder in folders
    )
