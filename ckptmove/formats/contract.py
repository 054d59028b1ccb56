"""The contract of every container: a checkpoint in one file, as a tree and as the bytes of its storages.

Never knows a format. What a format lacks (checksums, code, a writer's name) has its answer here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from ckptmove.errors import InPlaceImpossible, NothingToUndo
from ckptmove.io.changes import Patch
from ckptmove.io.contracts import BytesSegment, CopySegment
from ckptmove.pickles.machine import interpret

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, ContainerName, Span, StorageRef
    from ckptmove.pickles.state import Machine


class Container(ABC):
    """A checkpoint in one file: an object pickle, where the format has one, and the bytes of its storages.

    Attributes:
        name: what it is, in the public contract.
        source: its bytes.
        limits: what it may ask for.
        byteorder: ``little`` or ``big``: of the elements of its storages.
        torch_version: version of torch that wrote it, where it says so.
        producer: who else wrote it, where it says so.
        has_devices: whether the format stores a device for each storage.
        why_no_devices: the reason for people where it stores none.
        has_code: whether it holds code that relies on the dtypes of its tensors.
        is_torch_save: whether ``torch.save`` writes it, in a form that ``torch.load`` has read since 0.1.10.
        is_editable: whether ``convert`` can change it.
        is_mappable: whether ``torch.load(mmap=True)`` maps it.
        loader: the function or the library that reads its tensors.
        weights_only: the argument that loads it: False where weights-only mode refuses the format itself; None where
            the function has no such argument.
        not_weights_only: the reason for people where ``torch.load(weights_only=True)`` refuses the format itself.
        opened: names of functions whose every call was read as data: what a load of the file would run is known.
        placeholder: what begins a string in the tree that stands for a long one; empty where there are none.
    """

    name: ContainerName
    source: ByteSource
    limits: Limits
    byteorder: str = "little"
    torch_version: str | None = None
    producer: str | None = None
    has_devices: ClassVar[bool] = True
    why_no_devices: ClassVar[str] = ""
    has_code: ClassVar[bool] = False
    is_torch_save: ClassVar[bool] = False
    is_editable: ClassVar[bool] = True
    is_mappable: ClassVar[bool] = False
    loader: ClassVar[str] = "torch.load"
    weights_only: ClassVar[bool | None] = True
    not_weights_only: ClassVar[str] = ""
    opened: frozenset[str] = frozenset()
    placeholder: str = ""

    @classmethod
    @abstractmethod
    def open(cls, source: ByteSource, directory: ZipDirectory | None, limits: Limits) -> Container:
        """Open a file of this format.

        Args:
            source: its bytes.
            directory: its central directory, if it is a zip archive.
            limits: resource limits for reading it.

        Raises:
            DistributedFile: if the format is read as a directory only.
            DamagedArchive, DamagedPickle, LimitExceeded, CrcMismatch, UnsupportedContainer: if it cannot be read.
        """

    @classmethod
    def load_call(cls, file: str) -> str:
        """Python that loads a file on the CPU, without its last arguments and the closing parenthesis.

        Args:
            file: Python for its path, or for what reads it.
        """
        return f"torch.load({file}, map_location='cpu'"

    @abstractmethod
    def object_pickle(self) -> bytes:
        """The pickle of the saved object, or all of them in a row; no bytes where the format has none.

        Raises:
            LimitExceeded: it is larger than the limits allow.
            CrcMismatch: its bytes differ from their CRC.
        """

    def read(self) -> Machine:
        """The machine that has read :meth:`object_pickle`: its root is the tree of the saved object.

        Raises:
            DamagedPickle: the bytes are not a pickle of protocol 0 to 5.
            LimitExceeded: it asks for more than the limits allow.
            CrcMismatch: its bytes differ from their CRC.
        """
        return interpret(self.object_pickle(), self.limits)

    def code(self) -> Iterable[tuple[str, str]]:
        """Each piece of code that comes with the object, with its name.

        Raises:
            LimitExceeded: it is larger than the limits allow.
            CrcMismatch: its bytes differ from their CRC.
        """
        return ()

    def extras(self) -> Iterable[tuple[str, bytes]]:
        """The SHA-256 of each part of the checkpoint that is neither in its tree nor in a storage, by its name.

        Raises:
            CrcMismatch: the bytes of one differ from their CRC.
            SourceChanged, AccessFailed: as the source.
        """
        return ()

    @abstractmethod
    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Find the bytes of the storages, once, before anything else is asked about them; no storage is read.

        Where one of them lies may hang on the sizes of all the others.

        Args:
            storages: every storage that the object pickle names, whether a tensor views it or not.

        Returns:
            What is amiss with their bytes.

        Raises:
            DamagedArchive: the pickle and the file cannot both be right about where they lie.
        """

    @abstractmethod
    def storage_span(self, key: str) -> Span | None:
        """Where a storage's bytes lie in the source; None where it has none, or they are not stored plainly."""

    def check(self) -> tuple[ArchiveFact, ...]:
        """Read every record and compare it with its CRC: one ``crc-mismatch`` for each that differs."""
        return ()

    def has_checksums(self) -> bool:
        """Whether the file holds CRCs; torch can be told to leave them out."""
        return False

    @abstractmethod
    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The output with another object pickle in place of this one, all else as it is.

        Args:
            pickle: the new object pickle.
            casts: storages by key that change dtype: before and after.

        Returns:
            Segments that make up the output from its first byte to its last; storages keep the alignment that the
            format gives them.

        Raises:
            DamagedArchive: the bytes that are to be copied or cast are not all there.
        """

    def patch(self, pickle: bytes) -> Patch:
        """The change of the file itself that puts another object pickle in place of this one; no storage moves.

        Args:
            pickle: the new object pickle.

        Raises:
            InPlaceImpossible: the format has no room for it: here, it has another length.
            DamagedArchive, UneditablePickle: as :meth:`lay_out`.
        """
        writes: list[tuple[int, bytes]] = []
        position = 0
        for segment in self.lay_out(pickle, {}):
            if isinstance(segment, BytesSegment):
                end = position + len(segment.data)
                if end > self.source.size or self.source.read(position, end) != segment.data:
                    writes.append((position, segment.data))
                position = end
            elif isinstance(segment, CopySegment) and segment.span.start == position:
                position = segment.span.end
            else:
                break
        if position != self.source.size:
            reason = "its new pickle has another length, and everything behind it would have to move"
            raise InPlaceImpossible(self.source.path, reason)
        return Patch(tuple(writes), position)

    def undo(self) -> Patch:
        """The change that makes the file what it was before its first conversion in place.

        Raises:
            NothingToUndo: the file does not say what it was: only an archive has a place for that. What stands behind
                the end of a stream is the next object to a program that saved several into one.
        """
        raise NothingToUndo(self.source.path, f"a {self.name} file has no place to keep what it was")
