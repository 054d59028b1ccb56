"""What a checkpoint in a directory has besides those of one file: values, and ways to say no.

Never opens a directory: ``layouts`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmove.errors import NotACheckpoint, Refused
from ckptmove.model import ArchiveFact, Inventory

if TYPE_CHECKING:
    from ckptmove.model import ContainerName, LayoutName, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of a directory that is a checkpoint itself.

    Attributes:
        path: seen from the directory, parts joined by slashes.
        roles: what is in it.
        container: what its bytes are.
        layout: whose checkpoint it is, by itself.
        size_bytes: its size.
        tensors: how many tensors it holds.
        devices: their tags, in the order of the file.
    """

    path: str
    roles: tuple[Role, ...]
    container: ContainerName
    layout: LayoutName
    size_bytes: int
    tensors: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileFact(ArchiveFact):
    """A fact about the bytes of one of the files.

    Attributes:
        storage: key of the storage that it is about, in the directory; the record's name begins with the file.
    """

    storage: str

    @property
    def storage_key(self) -> str:
        """The key of the storage that it is about."""
        return self.storage


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryInventory(Inventory):
    """A directory as if it were one dict: the path of each file, and its content.

    Names begin with the path of their file and a dot, keys of storages with the path and a slash. ``root_keys`` are
    what state_dicts stand under: the path of a file, or that and a key of the file's root. Sites are those of all
    pickles laid end to end.

    Attributes:
        files: those that are checkpoints, in the order of their tensors.
    """

    files: tuple[FileRecord, ...]


class EmptyDirectory(NotACheckpoint):
    """No file of a directory is a checkpoint.

    Attributes:
        files: how many were looked at.
    """

    kind = "empty-directory"

    def __init__(self, path: str, files: int) -> None:
        super().__init__(path, f"a directory; by content, none of its files is one (looked at {files:,})")
        self.files = files


class OutputHoldsMore(Refused):
    """The directory that is to be replaced holds something that the new one does not.

    Attributes:
        name: the first such file.
    """

    kind = "output-holds-more"

    def __init__(self, path: str, name: str) -> None:
        super().__init__(f"the output is not replaced: it holds '{name}', which would be lost", path=path)
        self.name = name
