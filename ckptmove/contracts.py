"""The contracts between the rooms: a source of bytes, a sink for them, a container, and the layout of a new file.

Never implements one: formats and streams are siblings that know only this page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from ckptmove.model import ArchiveFact, ContainerName, Span, StorageRef

#: Told the number of bytes done so far and the number of bytes in all.
Progress: TypeAlias = "Callable[[int, int], None]"


class ByteSource(Protocol):
    """Random access to the bytes of one input.

    Attributes:
        path: the input as it was named.
        size: its length in bytes when it was opened.
    """

    path: str
    size: int

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive).

        Raises:
            DamagedArchive: the span reaches past ``size``.
            SourceChanged: the input has become shorter since it was opened.
            AccessFailed: the system failed to read.
        """
        ...

    def blocks(self, span: Span, block_bytes: int) -> Iterator[memoryview]:
        """The bytes of a span in blocks of at most ``block_bytes``; a block is valid until the next one is asked for.

        Raises:
            As :meth:`read`.
        """
        ...

    def close(self) -> None:
        """Let go of the input."""
        ...


class ByteSink(Protocol):
    """A new file that appears under its name only when it is whole and durable."""

    def __enter__(self) -> ByteSink:  # noqa: PYI034  # Self came with Python 3.11
        """Open the temporary file."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the temporary file unless :meth:`commit` has run."""
        ...

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            WriteFailed: the system failed to write them all.
        """
        ...

    def commit(self) -> None:
        """Make the bytes durable and give the file its name.

        Raises:
            WriteFailed: the system failed.
            OutputExists: the name has been taken meanwhile, and may not be replaced.
        """
        ...


@dataclass(frozen=True, slots=True)
class CheckedRange:
    """A record inside a copied span whose bytes have a known CRC.

    Attributes:
        span: its bytes in the source.
        crc: CRC-32 as the archive holds it.
        record: its name.
    """

    span: Span
    crc: int
    record: str


@dataclass(frozen=True, slots=True)
class CopySegment:
    """Bytes of the source that go to the output as they are.

    Attributes:
        span: where they lie in the source.
        checks: records inside, in order, to be checked while the bytes pass.
    """

    span: Span
    checks: tuple[CheckedRange, ...] = ()


@dataclass(frozen=True, slots=True)
class BytesSegment:
    """New bytes.

    Attributes:
        data: the bytes.
    """

    data: bytes


@dataclass(frozen=True, slots=True)
class InflateSegment:
    """Deflated bytes of the source that go to the output inflated.

    Attributes:
        span: where they lie in the source, deflated.
        nbytes: how many they have to be once inflated.
        crc: CRC-32 of the inflated bytes, or 0 where the archive holds none.
        record: name of the record that they are.
    """

    span: Span
    nbytes: int
    crc: int
    record: str


@dataclass(frozen=True, slots=True)
class CastSegment:
    """Elements of the source that go to the output in another dtype, element by element.

    Attributes:
        span: where they lie in the source.
        source: dtype there.
        target: dtype in the output.
        byteorder: ``little`` or ``big``: of both.
        check: the CRC that the source's bytes must have, or None.
        packed: how they inflate, where they are deflated; it has their CRC then.
    """

    span: Span
    source: str
    target: str
    byteorder: str
    check: CheckedRange | None
    packed: InflateSegment | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes they are before the cast."""
        return self.span.nbytes if self.packed is None else self.packed.nbytes


Segment: TypeAlias = "CopySegment | BytesSegment | CastSegment | InflateSegment"


class Container(Protocol):
    """A checkpoint in one file: an object pickle, where the format has one, and the bytes of its storages.

    Attributes:
        name: what it is, in the public contract.
        source: its bytes.
        byteorder: ``little`` or ``big``: of the elements of its storages.
        torch_version: version of torch that wrote it, where it says so.
    """

    name: ContainerName
    source: ByteSource
    byteorder: str
    torch_version: str | None

    def object_pickle(self) -> bytes:
        """The pickle of the saved object; no bytes where the format has none.

        Raises:
            LimitExceeded: it is larger than the limits allow.
            CrcMismatch: its bytes differ from their CRC.
        """
        ...

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
        ...

    def storage_span(self, key: str) -> Span | None:
        """Where a storage's bytes lie in the source; None where it has none, or they are not stored plainly."""
        ...

    def check(self) -> tuple[ArchiveFact, ...]:
        """Read every record and compare it with its CRC: one ``crc-mismatch`` for each that differs."""
        ...

    def has_checksums(self) -> bool:
        """Whether the archive holds CRCs; torch can be told to leave them out."""
        ...

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
        ...


@dataclass(frozen=True, slots=True)
class PicklePart:
    """One of several pickles that a container hands out as one run of bytes.

    Attributes:
        span: where it lies in that run.
        record: its name in the container, for errors.
        folder: what leads the keys of its storages, so that they are unique in the container; empty in the first.
        attribute: name under which its values hang on the object; empty where they do not hang there.
    """

    span: Span
    record: str
    folder: str = ""
    attribute: str = ""


@runtime_checkable
class ScriptContainer(Container, Protocol):
    """A container whose object comes with code, in several pickles.

    Its ``object_pickle`` is all of them, one after the other, and ``lay_out`` takes them so.
    """

    def parts(self) -> tuple[PicklePart, ...]:
        """Where each of the pickles is, that of the object first."""
        ...

    def code(self) -> Iterator[tuple[str, str]]:
        """Each piece of code with its name.

        Raises:
            LimitExceeded: it is larger than the limits allow.
            CrcMismatch: its bytes differ from their CRC.
        """
        ...
