"""The contracts between the rooms: a source of bytes, a sink for them, and the segments that make up a new file.

Never implements one: formats and streams are siblings that know only this page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ckptmove.model import Span

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

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """The bytes of a span in blocks of at most ``block_bytes``.

        A block is valid until ``buffers`` more have been asked for.

        Raises:
            As :meth:`read`.
        """
        ...

    def close(self) -> None:
        """Let go of the input."""
        ...


@runtime_checkable
class FileBacked(Protocol):
    """A source that is one open file, byte for byte: the kernel can copy from it."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...

    def require_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened.

        Raises:
            SourceChanged: it was.
        """
        ...


class ByteSink(Protocol):
    """The end of a new file; whoever opened it makes it whole and durable."""

    def clone(self, source: int) -> bool:
        """Begin as a clone of an open file, before the first byte, where the file system can; then nothing is reserved.

        Returns:
            Whether it has: then bytes that come to lie where the source has them need not be written.
        """
        ...

    def pass_over(self, nbytes: int) -> None:
        """Leave the next bytes of a clone as they are.

        Raises:
            WriteFailed: the system failed.
        """
        ...

    def reserve(self, nbytes: int) -> None:
        """Make room for the whole file, as far as that is possible, before the first byte.

        Raises:
            WriteFailed: there is no room for it.
        """
        ...

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            WriteFailed: the system failed to write them all.
        """
        ...

    def copy(self, source: int, start: int, nbytes: int) -> int:
        """Have the kernel append at most ``nbytes`` of an open file, from byte ``start`` on.

        Returns:
            How many were appended; 0 where the kernel cannot, or the file has become shorter: whoever then reads and
            writes them is told which.
        """
        ...


class CheckedRange(NamedTuple):
    """A record inside a copied span whose bytes have a known CRC.

    Attributes:
        span: its bytes in the source.
        crc: CRC-32 as the archive holds it.
        record: its name.
    """

    span: Span
    crc: int
    record: str


class CopySegment(NamedTuple):
    """Bytes of the source that go to the output as they are.

    Attributes:
        span: where they lie in the source.
        checks: records inside, in order, to be checked while the bytes pass.
    """

    span: Span
    checks: tuple[CheckedRange, ...] = ()


class BytesSegment(NamedTuple):
    """New bytes.

    Attributes:
        data: the bytes.
    """

    data: bytes


class InflateSegment(NamedTuple):
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


class CastSegment(NamedTuple):
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
