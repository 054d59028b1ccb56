"""The base class of every format that stores a checkpoint in one file.

A format overrides what it has; the defaults here answer for a format without checksums, code or a producer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckptmove.errors import InPlaceImpossible, NothingToUndo, Refused
from ckptmove.io.changes import Patch
from ckptmove.io.contracts import BytesSegment, CopySegment
from ckptmove.pickles.machine import interpret

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptmove.formats.zip_archive.index import ZipDirectory
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.model import ArchiveFact, Span, StorageRef
    from ckptmove.pickles.state import Machine


class ReadOnlyFormat(Refused):
    """A file would have to change, but its format is not written. ``instead`` says what to do; it may be empty."""

    kind = "read-only-format"

    def __init__(self, path: str, container: str, instead: str = "") -> None:
        super().__init__(f"it would change, and the format {container} is read, but not written", path=path)
        self.container = container
        self.instead = instead


class Container(ABC):
    """A checkpoint in one file: its object pickle and the bytes of its storages.

    Some formats have no pickle. They build the same tree from their own metadata, as if a machine had read a pickle.

    Attributes:
        name: name of the format in the JSON output; :mod:`ckptmove.formats.facts` has its properties.
        source: bytes of the file.
        limits: resource limits for reading it.
        byteorder: byte order of the storage elements, ``little`` or ``big``.
        torch_version: version of torch that wrote the file, if the file records it.
        producer: another program that wrote the file, if the file records it.
        opened: names of loader functions whose every call was parsed as data, so that their effect is known.
            A finding does not report them as unknown globals.
        placeholder: prefix of the strings in the tree that replace long strings; empty if no string is replaced.
        notes: strings that the file stores about its tensors.
    """

    name: str
    source: ByteSource
    limits: Limits
    byteorder: str = "little"
    torch_version: str | None = None
    producer: str | None = None
    opened: frozenset[str] = frozenset()
    placeholder: str = ""
    notes: Mapping[str, str] = MappingProxyType({})

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

    @abstractmethod
    def object_pickle(self) -> bytes:
        """The pickle of the saved object, or several pickles one after the other; empty if the format has no pickle.

        Raises:
            LimitExceeded: if it is larger than the limits allow.
            CrcMismatch: if its bytes differ from their CRC.
            DamagedArchive: if its place in the file is invalid.
        """

    def read(self) -> Machine:
        """Interpret :meth:`object_pickle`; the root of the returned machine is the tree of the saved object.

        Raises:
            DamagedPickle: if the bytes are not a valid pickle of protocol 0 to 5.
            LimitExceeded: if it needs more than the limits allow.
            CrcMismatch: if its bytes differ from their CRC.
            DamagedArchive: if it contradicts other parts of the file, or its place in the file is invalid.
        """
        return interpret(self.object_pickle(), self.limits)

    def read_compact(self) -> Machine:
        """As :meth:`read`, but the tree may be one that takes less memory and cannot be edited.

        Raises:
            NeedsEveryOperation: if only :meth:`read` can read it.
        """
        return self.read()

    def code(self) -> Iterable[tuple[str, str]]:
        """Name and text of each source file that is stored with the object.

        Raises:
            LimitExceeded: if the code is larger than the limits allow.
            CrcMismatch: if its bytes differ from their CRC.
        """
        return ()

    def extras(self) -> Iterable[tuple[str, bytes]]:
        """Name and SHA-256 of each part of the checkpoint that is neither in the tree nor in a storage.

        Raises:
            CrcMismatch: if the bytes of a part differ from their CRC.
            SourceChanged, AccessFailed: as the source.
        """
        return ()

    @abstractmethod
    def locate(self, storages: Sequence[StorageRef]) -> tuple[ArchiveFact, ...]:
        """Find the bytes of all storages. Call it once, before :meth:`storage_span`; it reads no storage.

        In some formats the place of a storage depends on the sizes of all the others.

        Args:
            storages: every storage in the object pickle, with or without a tensor that views it.

        Returns:
            Problems with the bytes of the storages.

        Raises:
            DamagedArchive: if the pickle and the file contradict each other about the places.
        """

    def strays(self) -> Iterable[tuple[str, Span]]:
        """Name and span of each run of bytes that belongs to no part of the checkpoint. Call :meth:`locate` before."""
        return ()

    def apart(self) -> Iterable[tuple[str, ByteSource]]:
        """Name and bytes of each part of the file that a load of the checkpoint does not read.

        Parts that can be neither a pickle nor an archive may be left out. Call :meth:`locate` before.

        Raises:
            DamagedArchive: if the place of a part is invalid.
        """
        return ()

    @abstractmethod
    def storage_span(self, key: str) -> Span | None:
        """Span of a storage's bytes in the source; None if they are missing or not stored plainly."""

    def storage_segment(self, key: str) -> Segment | None:
        """How the bytes of a storage are copied to an output; None if they are missing. Call :meth:`locate` before.

        Raises:
            DamagedArchive: if the place of the bytes is invalid.
            LimitExceeded: if they are deflated, and far more than the tensors need.
        """
        span = self.storage_span(key)
        return None if span is None else CopySegment(span)

    def storage_crc(self, key: str) -> int | None:
        """CRC-32 of the bytes of :meth:`storage_segment`, if the file records it."""
        return None

    def check(self, jobs: int = 1) -> tuple[ArchiveFact, ...]:
        """Read every record and compare it with its CRC; return a ``crc-mismatch`` for each that differs.

        Args:
            jobs: number of threads that read; more than one only for a source that threads can share.
        """
        del jobs
        return ()

    def has_checksums(self) -> bool:
        """Whether the file holds CRCs. torch can be configured to leave them out."""
        return False

    @abstractmethod
    def lay_out(self, pickle: bytes, casts: Mapping[str, tuple[str, str]]) -> tuple[Segment, ...]:
        """The output file: a new object pickle, and everything else unchanged.

        Args:
            pickle: the new object pickle.
            casts: storages by key that change dtype: the dtype before and after.

        Returns:
            Segments of the output from its first byte to its last. Storages keep the alignment of the format.

        Raises:
            DamagedArchive: if bytes to copy or to cast are missing.
            ReadOnlyFormat: if the format is not written, and anything changes.
        """

    def patch(self, pickle: bytes) -> Patch:
        """The writes that put a new object pickle into the file itself; no storage moves.

        Args:
            pickle: the new object pickle.

        Raises:
            InPlaceImpossible: if the format has no room for it; here, if its length differs.
            DamagedArchive, UneditablePickle, ReadOnlyFormat: as :meth:`lay_out`.
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
            reason = "its new pickle has another length, and all bytes after it would move"
            raise InPlaceImpossible(self.source.path, reason)
        return Patch(tuple(writes), position)

    def undo(self) -> Patch:
        """The writes that restore the file to its state before its first in-place conversion.

        Raises:
            NothingToUndo: if the file does not record its earlier state. Only an archive has room for it: bytes after
                the end of a stream are the next object to a program that saved several objects into one file.
        """
        raise NothingToUndo(self.source.path, f"a {self.name} file does not record its earlier state")
