"""Pickles that lie in a file one after another: where each of them ends.

Never interprets one, and never reads much more of the file than the pickle takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.pickles.machine import runs_before
from ckptmove.pickles.scan import SHAPE_OF, STOP, variable_end

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

#: Bytes that are read at first; then as many again as there are, until the pickle ends.
_FIRST_BYTES: Final = 1 << 12
#: Length of an operation by its opcode; 0 where it has to be looked at.
_LENGTHS: Final = [1 + SHAPE_OF[code] if code != STOP and SHAPE_OF.get(code, -1) >= 0 else 0 for code in range(256)]


def read_pickle(source: ByteSource, start: int, limits: Limits) -> bytes:
    """One pickle of a file, up to and including its STOP.

    Args:
        source: the file.
        start: offset of its first byte.
        limits: what it may ask for.

    Raises:
        DamagedPickle: no such opcode, or the file ends before STOP.
        LimitExceeded: it, or a string in it, is larger than the limits allow.
        SourceChanged, AccessFailed: as the source.
    """
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
    """Go on from one operation, to the end of STOP or to the first operation that the data do not hold whole."""
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
    """Before more is read: what is there does not ask for more than the file has, or than the limits allow."""
    if position < len(data):
        end = variable_end(data, position + 1, SHAPE_OF[data[position]]) or len(data)
        if end > room:
            raise DamagedPickle("an argument reaches past the end", offset=position)
        if end - position > limits.string_bytes:
            nbytes = end - position
            raise LimitExceeded("the size of a string in bytes", limit=limits.string_bytes, actual=nbytes)
    if len(data) > limits.pickle_bytes:
        raise LimitExceeded("the size of a pickle in bytes", limit=limits.pickle_bytes, actual=len(data))
