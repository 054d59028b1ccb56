"""Read a pickle without its long strings: for files whose tensors are inside the pickle itself.

A long string is skipped, not read; the outline holds a short placeholder instead.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.io.contracts import BytesSegment, CopySegment
from ckptmove.model import Span
from ckptmove.pickles.machine import interpret, runs_before
from ckptmove.pickles.scan import SHAPE_OF, STOP, operations, variable_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits
    from ckptmove.pickles.state import Machine

    #: New bytes of a long string in the output by its index, as segments and their number; None keeps the old ones.
    Contents: TypeAlias = Callable[[int], "tuple[Sequence[Segment], int] | None"]

_WINDOW: Final = 1 << 16
_FRAME: Final = 0x95
_FRAME_HEAD: Final = 9
#: Width in bytes of a string's length, by opcode. Text: BINUNICODE, BINUNICODE8. Bytes and the ``str`` of Python 2:
#: BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8, BINSTRING, SHORT_BINSTRING.
_TEXT_WIDTHS: Final = {ord("X"): 4, 0x8D: 8}
_WIDTHS: Final = _TEXT_WIDTHS | {ord("B"): 4, ord("C"): 1, 0x8E: 8, 0x96: 8, ord("T"): 4, ord("U"): 1}
#: Opcode of the same type with a wider length.
_WIDER: Final = {ord("C"): ord("B"), ord("B"): 0x8E, ord("U"): ord("T"), ord("T"): 0x8E}
#: Minimum lengths of a long string. The shortest stream of torch is longer.
_LONG_BYTES: Final = 128
_LONG_TEXT: Final = 1 << 16
_DIGITS: Final = 12
_HASH_BYTES: Final = 16


class LongString(NamedTuple):
    """A string that was skipped."""

    opcode: int  # opcode that pushes it
    start: int  # offset of that operation in the file
    span: Span  # its bytes in the file

    @property
    def is_text(self) -> bool:
        """Whether its bytes are UTF-8."""
        return self.opcode in _TEXT_WIDTHS


class PickleOutline(NamedTuple):
    """A pickle with placeholders for its long strings."""

    data: bytes  # the pickle with placeholders; frame lengths are adapted
    strings: tuple[LongString, ...]  # the long strings, in file order
    end: int  # offset after its STOP in the file
    #: prefix of all placeholders, unique in ``data``. A placeholder is this prefix and the index in ``strings``, in
    #: digits.
    marks: bytes

    def find(self, value: object) -> int | None:
        """Index of the long string whose placeholder is a value of the tree, or None."""
        raw = value.encode("utf-8", "surrogatepass") if type(value) is str else value
        if not isinstance(raw, bytes) or not raw.startswith(self.marks) or len(raw) != len(self.marks) + _DIGITS:
            return None
        return int(raw[len(self.marks) :])

    def file_offset(self, offset: int) -> int:
        """Offset in the file of an operation of ``data``."""
        passed = (place for place, start, _ in self._marked(self.data) if start < offset)
        return offset + sum(self.strings[place].span.nbytes - len(self.marks) - _DIGITS for place in passed)

    def _marked(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        """Each placeholder in an outline: index of its string, and start and end of the operation that pushes it."""
        for match in re.finditer(re.escape(self.marks) + rb"(\d{%d})" % _DIGITS, data):
            place = int(match[1])
            yield place, match.start() - _WIDTHS[self.strings[place].opcode] - 1, match.end()

    def expand(self, data: bytes, contents: Contents) -> list[Segment]:
        """Segments of the file for this outline's ``data``, edited or not."""
        changes: list[tuple[int, int, list[Segment]]] = []
        starts: list[int] = []
        growth = [0]
        for place, start, end in self._marked(data):
            string = self.strings[place]
            segments, nbytes = contents(place) or ((CopySegment(string.span),), string.span.nbytes)
            head = _head(string.opcode, nbytes)
            changes.append((start, end, [BytesSegment(head), *segments]))
            starts.append(start)
            growth.append(growth[-1] + len(head) + nbytes - (end - start))
        for frame in (start for start, _, opcode in operations(data) if opcode == _FRAME):
            begin, length = frame + _FRAME_HEAD, _frame_length(data, frame)
            length += growth[bisect_left(starts, begin + length)] - growth[bisect_left(starts, begin)]
            changes.append((frame + 1, begin, [BytesSegment(length.to_bytes(8, "little"))]))
        return _splice(data, changes)


def read_outlines(source: ByteSource, limits: Limits) -> Iterator[PickleOutline]:
    """Read the pickles of a file one after the other, without their long strings."""
    reader = _Reader(source, limits)
    while True:
        try:
            while not reader.step():
                pass
            outline = reader.outline()
        except DamagedPickle as error:
            runs = runs_before(reader.taken(), limits)
            raise DamagedPickle(error.detail, offset=error.offset, runs=runs) from error
        yield outline
        if outline.end == source.size:
            return
        reader.start_next()


class FirstPickle(NamedTuple):
    """What is known about the pickle at the start of bytes that may be anything."""

    machine: Machine | None = None  # the machine that has read it; None if it is damaged or not a pickle
    rest: int = 0  # number of bytes after it
    runs: tuple[str, ...] = ()  # dangerous names before the damage
    is_too_large: bool = False  # whether it exceeds a limit, so that its names are unknown


def first_pickle(source: ByteSource, limits: Limits) -> FirstPickle:
    """Read the pickle at the start of bytes that may be anything, without its long strings."""
    reader = _Reader(source, limits)
    try:
        while not reader.step():
            pass
        return FirstPickle(interpret(reader.taken(), limits), source.size - reader.offset)
    except DamagedPickle:
        return FirstPickle(runs=runs_before(reader.taken(), limits))
    except LimitExceeded:
        return FirstPickle(is_too_large=True)


class _Reader:
    """A walk over the operations of a file.

    ``_data`` up to ``_at`` is the outline so far; the rest of it was read ahead.
    """

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        self._source = source
        self._limits = limits
        self._data = bytearray()
        self._at = 0
        self._read = 0
        self._strings: list[LongString] = []
        #: Offset in ``_data`` of each placeholder, which is inserted at the end.
        self._places: list[int] = []
        self._frames: list[tuple[int, Span]] = []

    @property
    def offset(self) -> int:
        """Offset in the file of the next operation."""
        return self._read - (len(self._data) - self._at)

    def taken(self) -> bytes:
        """The pickle so far, with placeholders. Its frames are empty: they may end later."""
        data = self._data[: self._at]
        for place, _ in self._frames:
            data[place + 1 : place + _FRAME_HEAD] = bytes(_FRAME_HEAD - 1)
        return self._with_marks(data, b"0" * 2 * _HASH_BYTES)

    def start_next(self) -> None:
        del self._data[: self._at]
        self._at = 0
        self._strings, self._places, self._frames = [], [], []

    def step(self) -> bool:
        """Go over one operation; return whether it was STOP."""
        self._require(1)
        code = self._data[self._at]
        shape = SHAPE_OF.get(code)
        if shape is None:
            raise DamagedPickle(f"no such opcode 0x{code:02x}", offset=self.offset)
        if code in _WIDTHS and self._skip(code, _WIDTHS[code]):
            return False
        end = self._end(shape)
        if code == _FRAME:
            begin = self.offset + _FRAME_HEAD
            self._frames.append((self._at, Span(begin, begin + _frame_length(self._data, self._at))))
        self._at = end
        if self._at > self._limits.pickle_bytes:
            raise LimitExceeded("the size of a pickle in bytes", limit=self._limits.pickle_bytes, actual=self._at)
        return code == STOP

    def outline(self) -> PickleOutline:
        end, data = self.offset, self._data[: self._at]
        # No file can contain its own hash.
        marks = hashlib.sha256(data).hexdigest()[: 2 * _HASH_BYTES].encode()
        ends = [string.span.end for string in self._strings]
        saved = [0, *accumulate(one.span.nbytes - _DIGITS - len(marks) for one in self._strings)]
        for place, frame in self._frames:
            first, last = bisect_left(ends, frame.start), bisect_left(ends, frame.end + 1)
            if last < len(ends) and self._strings[last].start < frame.end:
                raise DamagedPickle("a frame ends inside a string", offset=frame.start - _FRAME_HEAD)
            length = frame.nbytes - saved[last] + saved[first]
            data[place + 1 : place + _FRAME_HEAD] = length.to_bytes(8, "little")
        return PickleOutline(self._with_marks(data, marks), tuple(self._strings), end, marks)

    def _with_marks(self, data: bytearray, marks: bytes) -> bytes:
        """The operations with a placeholder for each long string."""
        pieces: list[bytes | bytearray] = []
        position = 0
        for number, (place, string) in enumerate(zip(self._places, self._strings, strict=True)):
            mark = marks + b"%0*d" % (_DIGITS, number)
            pieces += data[position:place], _head(string.opcode, len(mark)), mark
            position = place
        return b"".join([*pieces, data[position:]])

    def _skip(self, code: int, width: int) -> bool:
        """Skip a string if it is long."""
        self._require(1 + width)
        begin = self._at + 1 + width
        nbytes = int.from_bytes(self._data[self._at + 1 : begin], "little")
        if nbytes < (_LONG_TEXT if code in _TEXT_WIDTHS else _LONG_BYTES):
            return False
        start = self.offset
        span = Span(start + 1 + width, start + 1 + width + nbytes)
        if span.end > self._source.size:
            raise DamagedPickle("an argument reaches past the end", offset=start)
        if len(self._strings) >= self._limits.records:
            limit = self._limits.records
            raise LimitExceeded("the number of long strings", limit=limit, actual=limit + 1)
        self._strings.append(LongString(code, start, span))
        self._places.append(self._at)
        self._read = max(self._read, span.end)
        del self._data[self._at : begin + nbytes]
        return True

    def _end(self, shape: int) -> int:
        """End of the operation in ``_data``; the whole operation is read."""
        if shape >= 0:
            self._require(1 + shape)
            return self._at + 1 + shape
        while True:
            end = variable_end(self._data, self._at + 1, shape)
            nbytes = (end or len(self._data)) - self._at
            if self.offset + nbytes > self._source.size:
                raise DamagedPickle("an argument reaches past the end", offset=self.offset)
            if nbytes > self._limits.string_bytes:
                limit = self._limits.string_bytes
                raise LimitExceeded("the size of a string in bytes", limit=limit, actual=nbytes)
            if 0 < end <= len(self._data):
                return end
            # A line may end anywhere: each attempt reads twice as much.
            self._require(nbytes if end else 2 * nbytes, whole=end > 0)

    def _require(self, nbytes: int, *, whole: bool = True) -> None:
        """Read ahead until this number of bytes is available."""
        missing = nbytes - (len(self._data) - self._at)
        if missing <= 0:
            return
        end = min(self._read + max(missing, _WINDOW), self._source.size)
        if end - self._read < (missing if whole else 1):
            raise DamagedPickle("it ends before STOP", offset=self.offset)
        self._data += self._source.read(self._read, end)
        self._read = end


def _head(opcode: int, nbytes: int) -> bytes:
    """Opcode and length of a string; an opcode with a wider length if the original's is too narrow."""
    while nbytes >= 1 << 8 * _WIDTHS[opcode]:
        opcode = _WIDER[opcode]
    return bytes([opcode]) + nbytes.to_bytes(_WIDTHS[opcode], "little")


def _frame_length(data: bytes | bytearray, frame: int) -> int:
    return int.from_bytes(data[frame + 1 : frame + _FRAME_HEAD], "little")


def _splice(data: bytes, changes: list[tuple[int, int, list[Segment]]]) -> list[Segment]:
    segments: list[Segment] = []
    position = 0
    for start, end, new in sorted(changes, key=lambda one: one[0]):
        segments += BytesSegment(data[position:start]), *new
        position = end
    return [*segments, BytesSegment(data[position:])]
