"""A checkpoint with the places of its bytes: one file, or the files of a directory as if they were one.

Never keeps a file of a directory open: there may be thousands of them.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmove.checkpoint import naming, open_checkpoint
from ckptmove.directories import DirectoryInventory
from ckptmove.errors import UnsupportedContainer
from ckptmove.layouts.reading import read_directory
from ckptmove.streams.counted import CountedSource
from ckptmove.streams.source import is_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.checkpoint import Checkpoint
    from ckptmove.containers.contract import Container
    from ckptmove.contracts import Progress
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, Inventory, Span
    from ckptmove.pickles.tree import Value


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        name: its path seen from the directory, with which names and keys of storages begin there; empty for a
            checkpoint of one file, where they begin with nothing.
        container: what it is; of a directory's file, closed.
        root: of its tree.
        inventory: what it holds, in the terms of the whole.
        base: what was added to its sites.
        spans: where the bytes of its storages lie, by their keys in the file.
    """

    name: str
    container: Container
    root: Value
    inventory: Inventory
    base: int
    spans: Mapping[str, Span | None]

    @property
    def path(self) -> str:
        """The file as the system knows it."""
        return self.container.source.path

    def span(self, key: str) -> Span | None:
        """Where a storage's bytes lie; None where it has none, or they are not stored plainly.

        Args:
            key: of the storage in the whole checkpoint.
        """
        return self.spans.get(key[len(self.name) + 1 :] if self.name else key)

    def own_name(self, name: str) -> str:
        """The name that a tensor of the whole checkpoint has in this file."""
        return name[len(self.name) + 1 :] if self.name else name


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint, whether in one file or in several.

    Attributes:
        inventory: what it holds.
        files: those that hold it.
        others: of a directory: what else is in it, by its path seen from there, as the system knows it.
    """

    inventory: Inventory
    files: tuple[StoredFile, ...]
    others: Mapping[str, str]


@contextmanager
def open_whole(path: str, limits: Limits) -> Iterator[WholeCheckpoint]:
    """Read a checkpoint, and find the bytes of its storages.

    Args:
        path: a file or a directory.
        limits: what it, and each file in it, may ask for.

    Raises:
        UnreadableInput: it cannot be read, is damaged, or is no checkpoint.
        LimitExceeded: it asks for more than the limits allow.
    """
    if is_folder(path):
        with naming(path):
            yield _of_directory(path, limits)
    else:
        with open_checkpoint(path, limits) as checkpoint:
            inventory = checkpoint.inventory
            file = StoredFile("", checkpoint.container, checkpoint.machine.root, inventory, 0, _spans(checkpoint))
            yield WholeCheckpoint(inventory, (file,), {})


def check_bytes(whole: WholeCheckpoint, limits: Limits, progress: Progress | None = None) -> tuple[ArchiveFact, ...]:
    """All that is to be said of the bytes, each record compared with its CRC.

    Args:
        whole: an open checkpoint.
        limits: what its files may ask for.
        progress: told of bytes checked and bytes in all.

    Raises:
        UnreadableInput: a file cannot be read any more.
    """
    if isinstance(whole.inventory, DirectoryInventory):
        return read_directory(whole.inventory.path, limits, check=True, progress=progress).inventory.facts
    (file,) = whole.files
    if progress is not None:
        file.container.source = CountedSource(file.container.source, progress)
    return whole.inventory.facts + file.container.check()


def _of_directory(path: str, limits: Limits) -> WholeCheckpoint:
    seen: dict[str, tuple[Container, Value, Mapping[str, Span | None]]] = {}

    def visit(name: str, checkpoint: Checkpoint) -> None:
        seen[name] = checkpoint.container, checkpoint.machine.root, _spans(checkpoint)

    directory = read_directory(path, limits, visit=visit)
    for part in directory.parts:
        if part.file.path not in seen:
            raise UnsupportedContainer(
                part.inventory.path, "dcp", "a distributed checkpoint, whose tensors lie in pieces"
            )
    files = tuple(
        StoredFile(part.file.path, container, root, part.inventory, part.base, spans)
        for part in directory.parts
        for container, root, spans in (seen[part.file.path],)
    )
    listing = directory.listing
    others = {file.path: listing.full(file.path) for file in listing.files if not (file.is_hidden or file.path in seen)}
    return WholeCheckpoint(directory.inventory, files, others)


def _spans(checkpoint: Checkpoint) -> Mapping[str, Span | None]:
    container = checkpoint.container
    return {storage.key: container.storage_span(storage.key) for storage in checkpoint.inventory.storages}
