"""Define the interfaces for input and output: byte sources, byte sinks, and the segments of a new file."""

import zlib
from collections.abc import Callable, Iterator
from threading import Lock
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from ckptmove.model import Span
from ckptmove.text import amount, size

#: Called with the bytes done so far and the total.
Progress: TypeAlias = Callable[[int, int], None]


class Traffic:
    """Requests to servers, and the bytes that they answered. Threads may add to it.

    Attributes:
        requests: number of requests, with those that were redirected or repeated.
        nbytes: number of bytes read.
    """

    def __init__(self, *, requests: int = 0, nbytes: int = 0) -> None:
        self.requests, self.nbytes = requests, nbytes
        self._lock = Lock()

    def add(self, *, requests: int = 0, nbytes: int = 0) -> None:
        """Count requests and bytes."""
        with self._lock:
            self.requests += requests
            self.nbytes += nbytes

    def described(self, size_bytes: int) -> str:
        """The traffic of a checkpoint of this size: ``read 512 KiB of 9.4 GiB in 2 requests``."""
        read, whole = (size(nbytes).replace(".0 ", " ") for nbytes in (self.nbytes, size_bytes))
        return f"read {read} of {whole} in {amount(self.requests, 'request')}"


class ByteSource(Protocol):
    """Random access to the bytes of one input.

    Attributes:
        path: the input as given by the user.
        size: its length in bytes when it was opened.
    """

    path: str
    size: int

    @property
    def is_remote(self) -> bool:
        """Whether each read far from the others costs a request to a server."""
        ...

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end`` (exclusive).

        Raises:
            DamagedArchive: if the span is invalid or reaches past ``size``.
            SourceChanged: if the input is shorter than when it was opened.
            AccessFailed: if the system fails to read.
        """
        ...

    def blocks(self, span: Span, block_bytes: int, buffers: int = 1) -> Iterator[memoryview]:
        """Yield the bytes of a span in blocks of at most ``block_bytes``.

        A block is valid until ``buffers`` more blocks have been taken. Raises the errors of :meth:`read`.
        """
        ...

    def close(self) -> None:
        """Close the input."""
        ...


@runtime_checkable
class FileBacked(Protocol):
    """A source that is one open file, byte for byte, so that the kernel can copy from it."""

    def fileno(self) -> int:
        """Return the file descriptor."""
        ...


@runtime_checkable
class ReadsInto(Protocol):
    """A source that reads into memory of the caller."""

    def read_into(self, start: int, memory: memoryview) -> None:
        """Read bytes from ``start`` on until the memory is full; errors as of :meth:`ByteSource.read`."""
        ...


@runtime_checkable
class Versioned(Protocol):
    """A source that is one file, on the disk or at a URL, whose changes can be noticed."""

    def require_unchanged(self) -> None:
        """Raise SourceChanged if the file was written to since it was opened."""
        ...


class ByteWriter(Protocol):
    """A part of a new file, written from start to end."""

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            WriteFailed: if the system fails to write them all.
        """
        ...

    def copy(self, source: int, start: int, nbytes: int) -> int:
        """Let the kernel append up to ``nbytes`` of an open file, from byte ``start`` on.

        Returns:
            Number of bytes appended; 0 if the kernel cannot copy them or the file has become shorter. Reading and
            writing the remaining bytes then raises the right error.
        """
        ...


class ByteSink(ByteWriter, Protocol):
    """A new file, written from start to end. The code that opened it makes it complete and durable."""

    def at(self, start: int) -> ByteWriter:
        """Return a writer for the bytes from ``start`` on. Threads can write different parts of the file at once."""
        ...

    def skip(self, nbytes: int) -> None:
        """Skip the next bytes, which writers of :meth:`at` wrote.

        Raises:
            WriteFailed: if the system fails.
        """
        ...

    def reserve(self, nbytes: int) -> None:
        """Reserve space for the whole file before the first byte, as far as the system can.

        Raises:
            WriteFailed: if there is not enough space.
        """
        ...


class CheckedRange(NamedTuple):
    """A record with a known CRC in a copied span.

    Attributes:
        span: its bytes in the source.
        crc: CRC-32 stored in the archive.
        record: its name.
    """

    span: Span
    crc: int
    record: str


class CopySegment(NamedTuple):
    """Bytes copied unchanged from the source.

    Attributes:
        span: their place in the source.
        checks: records in the span, in order, whose CRC is checked while they are copied.
    """

    span: Span
    checks: tuple[CheckedRange, ...] = ()


class BytesSegment(NamedTuple):
    """New bytes."""

    data: bytes


class InflateSegment(NamedTuple):
    """Deflated bytes of the source, inflated in the output.

    Attributes:
        span: the deflated bytes in the source.
        nbytes: required inflated size.
        crc: CRC-32 of the inflated bytes; 0 if the archive has none.
        record: name of the record.
    """

    span: Span
    nbytes: int
    crc: int
    record: str


class CastSegment(NamedTuple):
    """Elements of another segment, each cast to another dtype in the output.

    Attributes:
        segment: their bytes.
        source: dtype of these.
        target: dtype in the output.
        byteorder: ``little`` or ``big``, of both.
    """

    segment: "Segment"
    source: str
    target: str
    byteorder: str


class FromSource(NamedTuple):
    """A segment of another source than that of the output's other segments.

    Attributes:
        source: the other source. The code that opened it closes it after the whole output was written. A source that is
            one of many should open its file only when it is read.
        segment: the segment of that source.
    """

    source: ByteSource
    segment: "Segment"


class StreamSegment(NamedTuple):
    """Bytes that are produced while they are written.

    Attributes:
        nbytes: required number of bytes.
        blocks: yields them in order. A block is valid until the next one is taken.
    """

    nbytes: int
    blocks: Callable[[], Iterator[bytes | memoryview]]


class RunningCrc:
    """A CRC-32 that is computed while bytes are streamed.

    Attributes:
        value: CRC-32 of the bytes so far.
    """

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def reset(self) -> None:
        """Start with the first byte again."""
        self.value = 0

    def feed(self, block: bytes | memoryview) -> None:
        """Process the next block."""
        self.value = zlib.crc32(block, self.value)


class Summed(NamedTuple):
    """Segments whose CRC-32 is computed while they are written.

    Attributes:
        segments: the segments, one after the other.
        crc: their CRC-32, complete once the last one was written.
    """

    segments: tuple["Segment", ...]
    crc: RunningCrc


class LateSegment(NamedTuple):
    """New bytes that depend on segments before them, for example on their CRC-32.

    Attributes:
        nbytes: required number of bytes.
        make: returns them; called when all segments before were written.
    """

    nbytes: int
    make: Callable[[], bytes]


Segment: TypeAlias = (
    CopySegment | BytesSegment | CastSegment | InflateSegment | FromSource | StreamSegment | Summed | LateSegment
)
