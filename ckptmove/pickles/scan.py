"""Find the end of each operation of a pickle, for protocols 0 to 5.

The table follows CPython's ``pickletools.opcodes``; a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import DamagedPickle

if TYPE_CHECKING:
    from collections.abc import Iterator

# Shape of an operation's argument. A shape >= 0 is a fixed number of bytes.
_LINE: Final = -1
_TWO_LINES: Final = -2
_COUNT1: Final = -3
_COUNT4: Final = -4
_COUNT8: Final = -5

_SHAPES: Final[dict[int, bytes]] = {
    0: b"(.012NQR]})abdeloqstu\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98",
    1: b"Khq\x80\x82",
    2: b"M\x83",
    4: b"Jjr\x84",
    8: b"G\x95",
    _LINE: b"FILPSVgp",
    _TWO_LINES: b"ci",
    _COUNT1: b"CU\x8a\x8c",
    _COUNT4: b"BTX\x8b",
    _COUNT8: b"\x8d\x8e\x96",
}
SHAPE_OF: Final[dict[int, int]] = {code: shape for shape, codes in _SHAPES.items() for code in codes}

# Opcodes that torch's weights-only unpickler accepts (torch/_weights_only_unpickler.py, ``Unpickler.load``).
WEIGHTS_ONLY_OPCODES: Final = frozenset(b"c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a\x80.")

STOP: Final = ord(".")
PUTS: Final = frozenset(b"pqr\x94")
GETS: Final = frozenset(b"ghj")


def operation_end(data: bytes, start: int) -> int:
    """Return the offset of the first byte after the operation at ``start`` and its argument."""
    if not 0 <= start < len(data):
        raise DamagedPickle("it ends before STOP", offset=start)
    shape = SHAPE_OF.get(data[start])
    if shape is None:
        raise DamagedPickle(f"no such opcode 0x{data[start]:02x}", offset=start)
    end = start + 1 + shape if shape >= 0 else variable_end(data, start + 1, shape)
    if not 0 < end <= len(data):
        raise DamagedPickle("an argument reaches past the end", offset=start)
    return end


def variable_end(data: bytes | bytearray, begin: int, shape: int) -> int:
    """Return the offset of the first byte after an argument of variable length; 0 if a newline is missing.

    It can be past the end of the data: always if the argument's length field is cut off.
    """
    if shape == _LINE:
        return data.find(b"\n", begin) + 1
    if shape == _TWO_LINES:
        middle = data.find(b"\n", begin) + 1
        return data.find(b"\n", middle) + 1 if middle else 0
    width = {_COUNT1: 1, _COUNT4: 4, _COUNT8: 8}[shape]
    return begin + width + int.from_bytes(data[begin : begin + width], "little")


def operations(data: bytes, start: int = 0) -> Iterator[tuple[int, int, int]]:
    """Yield start, end (exclusive) and opcode of the operations of one pickle, up to and including STOP."""
    opcode = -1
    while opcode != STOP:
        end = operation_end(data, start)
        opcode = data[start]
        yield start, end, opcode
        start = end
