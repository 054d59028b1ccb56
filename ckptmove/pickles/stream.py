"""Read one pickle from a file of consecutive pickles, without reading much past its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.pickles.machine import runs_before
from ckptmove.pickles.scan import SHAPE_OF, STOP, variable_end

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

#: Size of the first read in bytes; each further read doubles the data.
_FIRST_BYTES: Final = 1 << 12
#: Length of an operation by its opcode; 0 for STOP, unknown opcodes and variable lengths.
_LENGTHS: Final = [1 + SHAPE_OF[code] if code != STOP and SHAPE_OF.get(code, -1) >= 0 else 0 for code in range(256)]


def read_pickle(source: ByteSource, start: int, limits: Limits) -> bytes:
    """Read one pickle of a file, up to and including STOP."""
    data = bytearray()
    room = source.size - start
    position, done = 0, False
    try:
        while not done:
            _check_claims(data, position, room, limits)
            begin = start + len(data)
            data += source.read(begin, min(begin + max(_FIRST_BYTES, len(data)), source.size))
            position, done = _walk(data, position)
            if not done and len(data) == room:
                raise DamagedPickle("it ends before STOP", offset=min(position, room))  # noqa: TRY301  # as those of _walk
    except DamagedPickle as error:
        raise DamagedPickle(error.detail, offset=error.offset, runs=runs_before(bytes(data), limits)) from error
    return bytes(memoryview(data)[:position])


def _walk(data: bytearray, position: int) -> tuple[int, bool]:
    """Skip operations from ``position``; return the end of STOP and True, or the start of an incomplete operation."""
    lengths, size = _LENGTHS, len(data)
    while position < size:
        code = data[position]
        length = lengths[code]
        if length:
            position += length
            continue
        if code == STOP:
            return position + 1, True
        if code not in SHAPE_OF:
            raise DamagedPickle(f"no such opcode 0x{code:02x}", offset=position)
        end = variable_end(data, position + 1, SHAPE_OF[code])
        if not 0 < end <= size:
            break
        position = end
    return position, False


def _check_claims(data: bytearray, position: int, room: int, limits: Limits) -> None:
    """Check, before more is read, that the pickle fits the file and the limits."""
    if position < len(data):
        end = variable_end(data, position + 1, SHAPE_OF[data[position]]) or len(data)
        if end > room:
            raise DamagedPickle("an argument reaches past the end", offset=position)
        if end - position > limits.string_bytes:
            nbytes = end - position
            raise LimitExceeded("the size of a string in bytes", limit=limits.string_bytes, actual=nbytes)
    if len(data) > limits.pickle_bytes:
        raise LimitExceeded("the size of a pickle in bytes", limit=limits.pickle_bytes, actual=len(data))
