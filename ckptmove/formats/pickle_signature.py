"""Tell a pickle from other bytes by what ``pickle.load`` would do with them.

Any opcode may be the first one, and protocols 0 and 1 need no PROTO. So bytes without PROTO are a pickle if they reach
STOP, or if they call a dangerous name before they fail: text that happens to begin with an opcode does neither.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles.scan import SHAPE_OF, operations

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource

#: PROTO and its argument, written since protocol 2.
_PROTO: Final = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
#: Opcodes that import a name, and those that call it or a method of it; INST does both.
_IMPORTS: Final = frozenset(b"ci\x93")
_CALLS: Final = frozenset(b"Robiaesu\x81\x90\x92")
#: After these limits, all opcodes were valid: no other file comes as far.
_ENOUGH: Final = Limits(operations=1 << 20, string_bytes=1 << 24, pickle_bytes=1 << 20)
#: A memo of more entries takes gigabytes: letters as the index of LONG_BINPUT stand for half a billion and more.
_MOST_MEMO: Final = 1 << 28
#: Pickles in a row that are looked at, and bytes after one of them.
_PICKLES: Final = 64
_AFTER: Final = 4096
_BLANK: Final = b" \t\r\n\0"


def is_pickle(source: ByteSource, head: bytes, *, is_cut: bool = False) -> bool:
    """Whether ``pickle.load`` would read the bytes of a file, or run some of them before it fails.

    Args:
        source: its bytes.
        head: the first of them.
        is_cut: whether the file is longer than ``source``.
    """
    if head.startswith(_PROTO):
        return True
    is_called, end = _walk(head)
    goes_on = end == "later" and (is_cut or source.size > len(head))
    if not (is_called or goes_on or end == "stop"):
        return False
    try:
        return (goes_on and is_cut) or _is_read(source)
    except LimitExceeded as error:
        return error.actual <= (_MOST_MEMO if is_called else source.size)


def _walk(data: bytes) -> tuple[bool, Literal["stop", "later", "damage"]]:
    """Whether the operations of a pickle import a name and call one after it; and where they end."""
    is_imported = is_called = False
    try:
        for _, _, code in operations(data):
            is_imported = is_imported or code in _IMPORTS
            is_called = is_called or (is_imported and code in _CALLS)
    except DamagedPickle as error:
        is_known = error.offset == len(data) or data[error.offset] in SHAPE_OF
        return is_called, "later" if is_known else "damage"
    return is_called, "stop"


def _is_read(source: ByteSource) -> bool:
    """Whether one of the first pickles of a file calls a name, or ends where the file does."""
    from ckptmove.formats.pickle_outline import read_outlines
    from ckptmove.pickles.machine import interpret

    begin = 0
    try:
        for outline in islice(read_outlines(source, _ENOUGH), _PICKLES):
            interpret(outline.data, _ENOUGH)
            after = source.read(outline.end, min(outline.end + _AFTER, source.size))
            if _walk(outline.data)[0] or not after.strip(_BLANK):
                return True
            begin = outline.end
    except DamagedPickle as error:
        return bool(error.runs) and _walk(source.read(begin, min(begin + _ENOUGH.pickle_bytes, source.size)))[0]
    return False
