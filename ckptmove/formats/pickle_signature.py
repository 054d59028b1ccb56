"""Tell a pickle from other bytes by what ``pickle.load`` would do with them.

Any opcode may be the first one, and protocols 0 and 1 need no PROTO. So bytes without PROTO are a pickle if they reach
STOP, or if they call a dangerous name before they fail: text that happens to begin with an opcode does neither.

:func:`may_be_pickle` is asked before anything is read, and may say yes to other bytes. :func:`is_pickle` is the answer.
:func:`imports_nothing` makes sure that a pickle need not be read for its names.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles.scan import SHAPE_OF, STOP, operations, variable_end
from ckptmove.torch_facts.verdicts import EXTENSION

if TYPE_CHECKING:
    from ckptmove.io.contracts import ByteSource

#: PROTO and its argument, written since protocol 2.
_PROTO: Final = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
#: Opcodes that import a name: GLOBAL, INST, STACK_GLOBAL, EXT1, EXT2, EXT4.
_IMPORTS: Final = frozenset(b"ci\x93\x82\x83\x84")
#: Opcodes that call a name or a method of it; INST imports and calls.
_CALLS: Final = frozenset(b"Robiaesu\x81\x90\x92")
_BY_SCRIPT: Final = b"ctorch.jit._pickle\n"
#: Length of an operation by its opcode; 0 for STOP, imports, unknown opcodes and variable lengths.
_LENGTHS: Final = [
    1 + max(-1, SHAPE_OF.get(code, -1)) if code != STOP and code not in _IMPORTS else 0 for code in range(256)
]
#: PERSID and STRING.
_PERSISTENT: Final = b"P"
_QUOTED: Final = ord("S")
#: After these limits, all opcodes were valid: no other file comes as far.
_ENOUGH: Final = Limits(operations=1 << 20, string_bytes=1 << 24, pickle_bytes=1 << 20)
#: A memo of more entries takes gigabytes: letters as the index of LONG_BINPUT stand for half a billion and more.
_MOST_MEMO: Final = 1 << 28
#: Pickles in a row that are looked at, and bytes after one of them.
_PICKLES: Final = 64
_AFTER: Final = 4096
_BLANK: Final = b" \t\r\n\0"


def is_pickle(source: ByteSource, head: bytes, *, is_cut: bool = False) -> bool:
    """Whether ``pickle.load`` would read a file or run some of it. The source may be the start of the file."""
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
        last = source.read(begin, min(begin + _ENOUGH.pickle_bytes, source.size))
        return bool(names_of(error.runs)) and _walk(last)[0]
    return False


def names_of(runs: tuple[str, ...]) -> tuple[str, ...]:
    """The names without extension codes: in bytes that may be anything they are chance, and no process knows them."""
    return tuple(name for name in runs if not name.startswith(EXTENSION))


def may_be_pickle(head: bytes, size: int) -> bool:
    """Whether a file could be a pickle: its first bytes are operations that fit the stack, up to STOP or their end.

    A persistent id comes first in no pickle that a loader reads to its end.
    """
    from ckptmove.pickles.machine import interpret

    is_cut = len(head) < size
    if head.startswith(_PERSISTENT):
        return False
    try:
        interpret(head + b"\n\n" if is_cut else head, Limits())  # a line may end after the head
    except DamagedPickle as error:
        if names_of(error.runs) or not is_cut or error.offset >= len(head):
            return bool(names_of(error.runs)) or is_cut
        code, begin = head[error.offset], error.offset + 1
        if code == _QUOTED:
            return head[begin : begin + 1] in {b"'", b'"'} and b"\n" not in head[begin:]
        shape = SHAPE_OF.get(code, 0)
        return (begin + shape if shape >= 0 else variable_end(head, begin, shape)) > len(head)
    return True


def imports_nothing(data: bytes) -> bool:
    """Whether no operation of a pickle imports a name, up to its damage, or up to STOP if nothing follows it.

    Each pickle of TorchScript's source ranges names one function that makes lists; it does not count.
    """
    lengths, position, size = _LENGTHS, 0, len(data)
    while position < size:
        length = lengths[data[position]]
        if length > 0:
            position += length
            continue
        code = data[position]
        if code == STOP:
            return position + 1 == size
        if code not in SHAPE_OF:
            return True
        if code in _IMPORTS and not data.startswith(_BY_SCRIPT, position):
            return False
        end = variable_end(data, position + 1, SHAPE_OF[code])
        if not end:
            return True
        position = end
    return True
