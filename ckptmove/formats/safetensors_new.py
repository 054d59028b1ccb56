"""Lay out a new safetensors file, byte for byte as the safetensors library writes it.

From ``prepare`` and ``Dtype`` in safetensors/src/tensor.rs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ckptmove.errors import LimitExceeded
from ckptmove.formats.safetensors_file import DTYPES, METADATA, NUMBERS
from ckptmove.io.contracts import BytesSegment
from ckptmove.io.segments import length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.io.contracts import Segment

_LENGTH_BYTES: Final = 8
#: The library refuses to read a longer header (``MAX_HEADER_SIZE``).
_MOST_HEADER_BYTES: Final = 100_000_000
_CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
#: Dtypes in the order of their tensors in a file: the reverse of the ``Dtype`` enum.
_ORDER: Final[dict[str, int]] = {
    code: index
    for index, code in enumerate((
        "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ",
        "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL",
    ))
}  # fmt: skip


class NewTensor(NamedTuple):
    """A tensor to write."""

    name: str  # its key
    dtype: str  # torch's name without `torch.`
    shape: tuple[int, ...]  # sizes as in torch
    segments: tuple[Segment, ...]  # its elements, contiguous and little-endian

    @property
    def nbytes(self) -> int:
        return sum(map(length, self.segments))


def obstacle(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Return why the format cannot hold a dense tensor, as a noun phrase; empty if it can."""
    if dtype not in _CODES or (dtype in NUMBERS and not shape):
        return f"a {len(shape)}-d {dtype} tensor" if dtype in NUMBERS else f"a {dtype} tensor"
    if name == METADATA:
        return "a name that the format reserves"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "a name that is not valid Unicode"
    return ""


def new_safetensors(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> tuple[Segment, ...]:
    """Segments of a new file, from its first byte to its last; :func:`obstacle` is empty for each of the tensors."""
    rows: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    segments: list[Segment] = []
    end = 0
    for tensor in sorted(tensors, key=lambda one: (_ORDER[_CODES[one.dtype]], one.name)):
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        if tensor.dtype in NUMBERS:
            shape[-1] *= NUMBERS[tensor.dtype]
        rows[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
        segments += tensor.segments
    header = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    if len(header) > _MOST_HEADER_BYTES:
        raise LimitExceeded(
            "the header of a safetensors file", limit=_MOST_HEADER_BYTES, actual=len(header), is_fixed=True
        )
    return BytesSegment(len(header).to_bytes(_LENGTH_BYTES, "little") + header), *segments
