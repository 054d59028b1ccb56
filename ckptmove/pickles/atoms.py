"""Handlers of the opcodes that push strings, numbers and constants."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any, Final

from ckptmove.errors import LimitExceeded
from ckptmove.pickles.tree import ByteArray, Python2Str

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.pickles.state import Handler, Machine
    from ckptmove.pickles.tree import Value

_U2: Final = struct.Struct("<H").unpack_from
_U4: Final = struct.Struct("<I").unpack_from
_I4: Final = struct.Struct("<i").unpack_from
_F8: Final = struct.Struct(">d").unpack_from

# STRING holds a Python 2 ``repr``; these are its escapes.
_ESCAPE: Final = rb"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{2})|(.))"
_ESCAPED: Final = {
    b"\\": b"\\",
    b"'": b"'",
    b'"': b'"',
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
}


def end_within(machine: Machine, end: int) -> int:
    """Return ``end``, or raise IndexError if the data is shorter."""
    if end > len(machine.data):
        raise IndexError
    return end


def line(machine: Machine, position: int) -> tuple[bytes, int]:
    """Read an argument of protocol 0: the rest of the line without its newline, and the offset after that."""
    end = machine.data.index(b"\n", position + 1)
    _check_size(machine, end - position - 1)
    return machine.data[position + 1 : end], end + 1


def _check_size(machine: Machine, nbytes: int) -> None:
    if nbytes > machine.limits.string_bytes:
        raise LimitExceeded("the size of a string in bytes", limit=machine.limits.string_bytes, actual=nbytes)


def _binunicode(machine: Machine, position: int) -> int:
    # Inlines `end_within` and `_check_size` for speed: one operation in twelve is a BINUNICODE.
    data = machine.data
    (length,) = _U4(data, position + 1)
    begin = position + 5
    end: int = begin + length
    if end > len(data):
        raise IndexError
    if length > machine.limits.string_bytes:
        _check_size(machine, length)
    machine.stack.append(data[begin:end].decode("utf-8", "surrogatepass"))
    machine.starts.append(position)
    return end


def _binint1(machine: Machine, position: int) -> int:
    machine.stack.append(machine.data[position + 1])
    machine.starts.append(position)
    return position + 2


def _number(unpack: Callable[[bytes, int], tuple[Any, ...]], end: int) -> Handler:
    def handle(machine: Machine, position: int) -> int:
        machine.stack.append(unpack(machine.data, position + 1)[0])
        machine.starts.append(position)
        return position + end

    return handle


def constant(value: Value) -> Handler:
    """Handle an opcode that pushes the same value each time."""

    def handle(machine: Machine, position: int) -> int:
        machine.stack.append(value)
        machine.starts.append(position)
        return position + 1

    return handle


def _counted(width: int, decode: Callable[[bytes], Value]) -> Handler:
    """Handle an argument that is preceded by its length: ``width`` bytes, little-endian."""

    def handle(machine: Machine, position: int) -> int:
        begin = position + 1 + width
        end = end_within(machine, begin + int.from_bytes(machine.data[position + 1 : begin], "little"))
        _check_size(machine, end - begin)
        machine.stack.append(decode(machine.data[begin:end]))
        machine.starts.append(position)
        return end

    return handle


def _line(decode: Callable[[bytes], Value]) -> Handler:
    """Handle an argument that ends at the newline."""

    def handle(machine: Machine, position: int) -> int:
        raw, end = line(machine, position)
        machine.stack.append(decode(raw))
        machine.starts.append(position)
        return end

    return handle


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _python2_text(raw: bytes) -> str:
    if raw.isascii():
        return raw.decode()
    text = Python2Str(raw.decode("utf-8", "backslashreplace"))
    text.raw = raw
    return text


def _long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _decimal(raw: bytes) -> int | bool:
    """Decode INT; ``00`` and ``01`` are the booleans of protocol 0."""
    if raw in {b"00", b"01"}:
        return raw == b"01"
    return int(raw, 0)


def _quoted(raw: bytes) -> str:
    stripped = raw.strip()
    quote = stripped[:1]
    if len(stripped) < 2 or quote not in {b"'", b'"'} or not stripped.endswith(quote):  # two quotes
        raise ValueError("a STRING without quotes")
    return _python2_text(re.sub(_ESCAPE, _unescape, stripped[1:-1]))


def _unescape(match: re.Match[bytes]) -> bytes:
    """Decode one escape as ``codecs.escape_decode`` does, but keep an unknown escape without a warning."""
    octal, hexadecimal, character = match.groups()
    if octal or hexadecimal:
        code = int(octal, 8) if octal else int(hexadecimal, 16)
        return bytes([code & 0xFF])
    return _ESCAPED.get(character, match[0])


HANDLERS: Final[dict[int, Handler]] = {
    ord("N"): constant(None),
    0x88: constant(True),
    0x89: constant(False),
    ord("I"): _line(_decimal),
    ord("J"): _number(_I4, 5),
    ord("K"): _binint1,
    ord("M"): _number(_U2, 3),
    ord("L"): _line(lambda raw: int(raw.removesuffix(b"L"), 0)),
    0x8A: _counted(1, _long),
    0x8B: _counted(4, _long),
    ord("F"): _line(float),
    ord("G"): _number(_F8, 9),
    ord("S"): _line(_quoted),
    ord("T"): _counted(4, _python2_text),
    ord("U"): _counted(1, _python2_text),
    ord("V"): _line(lambda raw: raw.decode("raw_unicode_escape")),
    ord("X"): _binunicode,
    0x8C: _counted(1, _text),
    0x8D: _counted(8, _text),
    ord("B"): _counted(4, bytes),
    ord("C"): _counted(1, bytes),
    0x8E: _counted(8, bytes),
    0x96: _counted(8, ByteArray),
}
