"""What one file of a checkpoint holds, by name and by byte: the contract, and the file that is a checkpoint itself.

Never looks at a tensor's bytes: it says where they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.elements import StoredBytes, extent
from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.opening import naming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptmove.checkpoint.layouts.listing import DiskPlace
    from ckptmove.checkpoint.opening import Checkpoint
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, Span, TensorRecord
    from ckptmove.pickles.tree import Value


class StoredPart(ABC):
    """A checkpoint that is a part of another one, or the whole of it.

    Attributes:
        name: its path seen from the directory, with which its names and keys begin; empty where they begin with
            nothing.
        path: the same as the system knows it, for people.
        inventory: what it holds, in the terms of the whole.
        is_distributed: whether it is a folder of torch.distributed.checkpoint, which keeps what is no tensor in its
            own way.
        base: what was added to its sites.
        byteorder: ``little`` or ``big``: of the elements of its storages.
        disk: where its bytes lie, one after the other; None where they do not, or are compressed.
        placeholder: what begins a string in the tree that stands for one of the extras, or nothing.
    """

    name: str
    path: str
    inventory: Inventory
    is_distributed: bool
    base: int
    byteorder: str
    disk: DiskPlace | None
    placeholder: str = ""

    @property
    @abstractmethod
    def has_checksums(self) -> bool:
        """Whether its bytes can be compared with CRCs."""

    @abstractmethod
    def span(self, key: str) -> Span | None:
        """Where the bytes of a storage lie in it; None where they are lost, or not stored plainly.

        Args:
            key: of the storage, in the part.
        """

    @abstractmethod
    def storage(self, key: str) -> StoredBytes | None:
        """The bytes of a storage; None where they are lost, or not stored plainly.

        Args:
            key: of the storage, in the part.

        Raises:
            MissingFile, AccessFailed, SourceChanged: the file cannot be read any more.
        """

    @abstractmethod
    def tree(self) -> Value:
        """The root of what was saved, read whenever it is asked for: whoever asks drops it again.

        Raises:
            UnreadableInput, LimitExceeded: it cannot be read any more.
        """

    @abstractmethod
    def budget(self) -> Budget:
        """What one walk over the tree may ask for."""

    @abstractmethod
    def extras(self) -> Mapping[str, bytes]:
        """The SHA-256 of each thing that is neither in the tree nor in a storage, by its name in the part."""

    @abstractmethod
    def lost(self) -> tuple[str, ...]:
        """Names, in the part, of what is no tensor and is not there, though it should be."""

    def stands_for_more(self, shown: str) -> bool:
        """Whether a value of the tree, as it is shown, stands for one of the extras."""
        return bool(self.placeholder) and self.placeholder in shown

    @property
    def is_file(self) -> bool:
        """Whether its path opens it: it is no folder and no member of an archive."""
        return self.disk is not None and self.disk.path == self.path

    def bytes_of(self, record: TensorRecord) -> tuple[StoredBytes, Span] | None:
        """The storage of a dense tensor, and where in it the tensor lies; None where that is not plainly stored."""
        key = self.own_key(record)
        stored = None if key is None else self.storage(key)
        span = None if stored is None else extent(stored, record)
        return None if stored is None or span is None else (stored, span)

    def why_not(self, record: TensorRecord) -> str:
        """Why :meth:`bytes_of` knows nothing of a tensor."""
        kind = self._kinds.get(record.storage or "")
        if kind == "encoded-storage":
            return f"written as text in {self.path}, as pickle protocols 0 to 2 write bytes"
        if kind == "compressed-storage":
            return f"compressed in {self.path}: ckptmove convert stores it plainly"
        return f"missing or cut off in {self.path}"

    def full_name(self, name: str) -> str:
        """The name in the whole checkpoint of what has one in the part."""
        return f"{self.name}.{name}" if self.name else name

    def own_name(self, name: str) -> str:
        """The name in the part of what has one in the whole checkpoint."""
        return name[len(self.name) + 1 :] if self.name else name

    def own_key(self, record: TensorRecord) -> str | None:
        """The key in the part of the storage that a tensor views."""
        key = record.storage
        return key[len(self.name) + 1 :] if self.name and key is not None else key

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """What is amiss with storages, by their keys."""
        return {fact.storage_key: fact.kind for fact in self.inventory.facts}


class FileContents(NamedTuple):
    """What is kept of a file once it was read: not its tree, as a small file can hold a large one.

    Attributes:
        spans: where the bytes of its storages lie, by their keys in the file.
        byteorder: of their elements.
        has_checksums: whether it holds CRCs.
        placeholder: what begins a string in the tree that stands for one of the extras, or nothing.
        pickle_bytes: size of the pickle that the tree comes from.
        limits: what the file may ask for.
    """

    spans: Mapping[str, Span | None]
    byteorder: str
    has_checksums: bool
    placeholder: str
    pickle_bytes: int
    limits: Limits

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> FileContents:
        """Those of an open checkpoint."""
        container, machine = checkpoint.container, checkpoint.machine
        spans = {storage.key: container.storage_span(storage.key) for storage in checkpoint.inventory.storages}
        size = machine.end - machine.begin
        sums = container.has_checksums()
        return cls(spans, container.byteorder, sums, container.placeholder, size, container.limits)


class FileAccess(NamedTuple):
    """How a file is read whenever it is asked for.

    Attributes:
        source: its bytes, for as long as the checkpoint is open.
        root: the root of its tree.
        extras: the SHA-256 of what is neither in the tree nor in a storage, by its name.
        disk: where its bytes lie; None where they are compressed.
        has_checksums: whether what it lies in keeps a CRC of it.
    """

    source: Callable[[], ByteSource]
    root: Callable[[], Value]
    extras: Callable[[], Mapping[str, bytes]]
    disk: DiskPlace | None
    has_checksums: bool = False


class FilePart(StoredPart):
    """A file."""

    is_distributed = False

    def __init__(
        self, name: str, path: str, inventory: Inventory, contents: FileContents, access: FileAccess, base: int = 0
    ) -> None:
        """Hold what was read of a file.

        Args:
            name: its path seen from the directory.
            path: the same as the system knows it.
            inventory: what it holds, in the terms of the whole.
            contents: what was read of it.
            access: reads the rest of it.
            base: what was added to its sites.
        """
        self.name, self.path, self.inventory, self.base = name, path, inventory, base
        self.byteorder, self.disk = contents.byteorder, access.disk
        self.placeholder = contents.placeholder
        self._contents, self._access = contents, access

    @property
    def has_checksums(self) -> bool:
        """Whether it holds CRCs, or what it lies in keeps one of it."""
        return self._contents.has_checksums or self._access.has_checksums

    @cached_property
    def source(self) -> ByteSource:
        """Its bytes, for as long as the checkpoint is open."""
        return self._access.source()

    def span(self, key: str) -> Span | None:
        """Where the bytes of a storage lie in it; None where they are lost, or not stored plainly."""
        return self._contents.spans.get(key)

    def storage(self, key: str) -> StoredBytes | None:
        """The bytes of a storage; None where they are lost, or not stored plainly."""
        span = self.span(key)
        return None if span is None else StoredBytes(self.source, span, self.byteorder)

    def tree(self) -> Value:
        """The root of what was saved."""
        return self._access.root()

    def budget(self) -> Budget:
        """What one walk over the tree may ask for."""
        return Budget(self._contents.limits, self._contents.pickle_bytes)

    def extras(self) -> Mapping[str, bytes]:
        """The SHA-256 of each thing that is neither in the tree nor in a storage, by its name in the file.

        Raises:
            CrcMismatch: the bytes of one of them differ from their CRC.
        """
        return self._extras

    @cached_property
    def _extras(self) -> Mapping[str, bytes]:
        with naming(self.path):
            return self._access.extras()

    def lost(self) -> tuple[str, ...]:
        """Nothing: what a file lacks besides tensors, it does not tell."""
        return ()
