"""A pickle without its long strings: what is read of a file whose tensors lie inside of the pickle itself.

Never reads a long string: it passes over it, and leaves a short mark in its place.
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
from ckptmove.pickles.machine import runs_before
from ckptmove.pickles.scan import SHAPE_OF, STOP, operations, variable_end

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits

    #: The bytes of a long string in the output, or None where they stay.
    Contents: TypeAlias = Callable[[int], "tuple[Sequence[Segment], int] | None"]

_WINDOW: Final = 1 << 16
_FRAME: Final = 0x95
_FRAME_HEAD: Final = 9
#: Bytes of the count that leads a string. Text is BINUNICODE, BINUNICODE8; the rest are bytes, and the ``str`` of
#: Python 2: BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8, BINSTRING, SHORT_BINSTRING.
_TEXT_WIDTHS: Final = {ord("X"): 4, 0x8D: 8}
_WIDTHS: Final = _TEXT_WIDTHS | {ord("B"): 4, ord("C"): 1, 0x8E: 8, 0x96: 8, ord("T"): 4, ord("U"): 1}
#: The same with a wider count.
_WIDER: Final = {ord("C"): ord("B"), ord("B"): 0x8E, ord("U"): ord("T"), ord("T"): 0x8E}
#: Less than the shortest stream of torch.
_LONG_BYTES: Final = 128
_LONG_TEXT: Final = 1 << 16
_DIGITS: Final = 12
_HASH_BYTES: Final = 16


class LongString(NamedTuple):
    """A string that was passed over.

    Attributes:
        opcode: that pushes it.
        start: offset of that operation in the file.
        span: its bytes in the file.
    """

    opcode: int
    start: int
    span: Span

    @property
    def is_text(self) -> bool:
        """Whether its bytes are UTF-8."""
        return self.opcode in _TEXT_WIDTHS


class PickleOutline(NamedTuple):
    """A pickle of which the long strings are marked only.

    Attributes:
        data: the pickle, a mark in the place of each long string; its frames are as long as what is in them.
        strings: the long strings, in the order of the file.
        end: offset after its STOP in the file.
        marks: what tells the marks from all else in ``data``: each is this and the place in ``strings``, in digits.
    """

    data: bytes
    strings: tuple[LongString, ...]
    end: int
    marks: bytes

    def find(self, value: object) -> int | None:
        """The place of the long string that a value of the tree stands for, or None."""
        raw = value.encode("utf-8", "surrogatepass") if type(value) is str else value
        if not isinstance(raw, bytes) or not raw.startswith(self.marks) or len(raw) != len(self.marks) + _DIGITS:
            return None
        return int(raw[len(self.marks) :])

    def file_offset(self, offset: int) -> int:
        """Where an operation of ``data`` stands in the file."""
        passed = (place for place, start, _ in self._marked(self.data) if start < offset)
        return offset + sum(self.strings[place].span.nbytes - len(self.marks) - _DIGITS for place in passed)

    def _marked(self, data: bytes) -> Iterator[tuple[int, int, int]]:
        """Each mark in an outline: the place of its string, and start and end of the operation that pushes it."""
        for match in re.finditer(re.escape(self.marks) + rb"(\d{%d})" % _DIGITS, data):
            place = int(match[1])
            yield place, match.start() - _WIDTHS[self.strings[place].opcode] - 1, match.end()

    def expand(self, data: bytes, contents: Contents) -> list[Segment]:
        """A file from an outline.

        Args:
            data: this outline's ``data``, edited or not.
            contents: by the place of a long string, its new bytes as segments and how many they are.
        """
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
    """Read the pickles of a file one after another, but for their long strings.

    Raises:
        DamagedPickle: no such opcode, the file ends before STOP, or a frame ends inside of a string.
        LimitExceeded: it, or a string in it, is larger than the limits allow.
        SourceChanged, AccessFailed: as the source.
    """
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
        reader.begin_anew()


class _Reader:
    """A walk over the operations of a file.

    ``_data`` is what is kept up to ``_at``, and behind it what has been read of the rest.
    """

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        self._source = source
        self._limits = limits
        self._data = bytearray()
        self._at = 0
        self._read = 0
        self._strings: list[LongString] = []
        #: Where the content of each mark begins in ``_data``, before they are marked with anything but their number.
        self._places: list[int] = []
        self._frames: list[tuple[int, Span]] = []

    @property
    def _offset(self) -> int:
        """Offset in the file of what comes next."""
        return self._read - (len(self._data) - self._at)

    def taken(self) -> bytes:
        """What is kept of the pickle so far, without what was read ahead."""
        return bytes(self._data[: self._at])

    def begin_anew(self) -> None:
        """Go on with the pickle behind the one that has ended."""
        del self._data[: self._at]
        self._at = 0
        self._strings, self._places, self._frames = [], [], []

    def step(self) -> bool:
        """Go over one operation; whether it was STOP."""
        self._require(1)
        code = self._data[self._at]
        shape = SHAPE_OF.get(code)
        if shape is None:
            raise DamagedPickle(f"no such opcode 0x{code:02x}", offset=self._offset)
        if code in _WIDTHS and self._pass_over(code, _WIDTHS[code]):
            return False
        end = self._end(shape)
        if code == _FRAME:
            begin = self._offset + _FRAME_HEAD
            self._frames.append((self._at, Span(begin, begin + _frame_length(self._data, self._at))))
        self._at = end
        if self._at > self._limits.pickle_bytes:
            raise LimitExceeded("the size of a pickle in bytes", limit=self._limits.pickle_bytes, actual=self._at)
        return code == STOP

    def outline(self) -> PickleOutline:
        """What was read."""
        end, data = self._offset, self._data[: self._at]
        # Nobody can write a file that holds its own hash.
        marks = hashlib.sha256(data).hexdigest()[: 2 * _HASH_BYTES].encode()
        ends = [string.span.end for string in self._strings]
        saved = [0, *accumulate(one.span.nbytes - _DIGITS - len(marks) for one in self._strings)]
        for place, frame in self._frames:
            first, last = bisect_left(ends, frame.start), bisect_left(ends, frame.end + 1)
            if last < len(ends) and self._strings[last].start < frame.end:
                raise DamagedPickle("a frame ends inside of a string", offset=frame.start - _FRAME_HEAD)
            length = frame.nbytes - saved[last] + saved[first]
            data[place + 1 : place + _FRAME_HEAD] = length.to_bytes(8, "little")
        pieces: list[bytes | bytearray] = []
        position = 0
        for number, (place, string) in enumerate(zip(self._places, self._strings, strict=True)):
            mark = marks + b"%0*d" % (_DIGITS, number)
            pieces += data[position:place], _head(string.opcode, len(mark)), mark
            position = place
        return PickleOutline(b"".join([*pieces, data[position:]]), tuple(self._strings), end, marks)

    def _pass_over(self, code: int, width: int) -> bool:
        """Leave a string out, if it is a long one."""
        self._require(1 + width)
        begin = self._at + 1 + width
        nbytes = int.from_bytes(self._data[self._at + 1 : begin], "little")
        if nbytes < (_LONG_TEXT if code in _TEXT_WIDTHS else _LONG_BYTES):
            return False
        start = self._offset
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
        """Where the operation ends in ``_data``, which then has it whole."""
        if shape >= 0:
            self._require(1 + shape)
            return self._at + 1 + shape
        while True:
            end = variable_end(self._data, self._at + 1, shape)
            nbytes = (end or len(self._data)) - self._at
            if nbytes > self._limits.string_bytes:
                limit = self._limits.string_bytes
                raise LimitExceeded("the size of a string in bytes", limit=limit, actual=nbytes)
            if 0 < end <= len(self._data):
                return end
            # A line may end anywhere: twice as much is looked at each time.
            self._require(nbytes if end else 2 * nbytes, whole=end > 0)

    def _require(self, nbytes: int, *, whole: bool = True) -> None:
        """Have so many bytes from here on at hand.

        Raises:
            DamagedPickle: the file ends before.
        """
        missing = nbytes - (len(self._data) - self._at)
        if missing <= 0:
            return
        end = min(self._read + max(missing, _WINDOW), self._source.size)
        if end - self._read < (missing if whole else 1):
            raise DamagedPickle("it ends before STOP", offset=self._offset)
        self._data += self._source.read(self._read, end)
        self._read = end


def _head(opcode: int, nbytes: int) -> bytes:
    """Opcode and count of a string; a wider count where the opcode's own is too narrow for it."""
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
