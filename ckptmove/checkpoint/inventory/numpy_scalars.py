"""Read pickled numpy scalars as numbers, for example a learning rate that is an ``np.float64``.

A pickled scalar is its dtype and its bytes (``numpy/_core/src/multiarray/scalartypes.c.src``, ``gentype_reduce``), so
numpy is not imported.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from ckptmove.pickles.tree import Call, Python2Str, tuple_items
from ckptmove.torch_facts.weights_only import modern_name

if TYPE_CHECKING:
    from ckptmove.pickles.tree import Value

_SCALARS: Final = frozenset({"numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"})
#: Codes of ``struct`` for numpy's dtype codes.
FORMATS: Final = {
    "f2": "e", "f4": "f", "f8": "d", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I",
    "u8": "Q", "b1": "?",
}  # fmt: skip


def scalar_value(value: Value) -> float | bool | None:
    """Return the value of a numpy scalar, or None for any other value."""
    if type(value) is not Call or value.name not in _SCALARS:
        return None
    match value.arguments:
        case (Call(name="numpy.dtype") as dtype, content):
            code, raw = dtype.arguments[:1], bytes_of(content)
            letter = FORMATS.get(code[0]) if code and isinstance(code[0], str) else None
            order = ">" if ">" in tuple_items(dtype.state)[1:2] else "<"
            if letter is not None and raw is not None and len(raw) == struct.calcsize(order + letter):
                number: float | bool = struct.unpack(order + letter, raw)[0]
                return number
    return None


def bytes_of(value: Value) -> bytes | None:
    """Return bytes, which protocol 2 of Python 3 writes as latin-1 text, and Python 2 as a ``str``."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.raw if type(value) is Python2Str else value.encode() if value.isascii() else None
    if type(value) is Call and modern_name(value.name) == "builtins.bytes":
        return b"" if value.arguments == () else None
    if type(value) is Call and value.name == "_codecs.encode":
        match value.arguments:
            case (str() as text, "latin1") if text.isascii() or max(text) <= "\xff":
                return text.encode("latin-1")
    return None
