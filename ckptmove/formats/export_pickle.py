"""Build a pickle like that of ``torch.save`` for a ``torch.export`` archive, so that it is read like other files.

The pickle is never written to a file.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from ckptmove.torch_facts.devices import split
from ckptmove.torch_facts.dtypes import DTYPE_STORAGE, ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

_HOOKS: Final = b"ccollections\nOrderedDict\n)R"


class ExportPickle:
    """A pickle under construction."""

    def __init__(self) -> None:
        self.data = bytearray(b"\x80\x02")

    def text(self, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        self.data += b"X" + struct.pack("<I", len(raw)) + raw

    def call(self, name: str, text: str) -> None:
        """Push the result of a function of torch with one string as its argument."""
        self.data += b"ctorch\n" + name.encode() + b"\n("
        self.text(text)
        self.data += b"tR"

    def device(self, tag: str) -> None:
        """Push a ``torch.device``, as Python pickles one."""
        kind, index = split(tag)
        self.data += b"ctorch\ndevice\n"
        self.text(kind)
        self.data += b"\x85R" if index is None else b"M" + struct.pack("<H", index) + b"\x86R"

    def tensor(
        self,
        key: str,
        tag: str,
        dtype: str,
        numel: int,
        offset: int,
        shape: Sequence[int],
        stride: Sequence[int],
        *,
        requires_grad: bool,
        is_parameter: bool,
    ) -> None:
        """Push a dense tensor in a storage of ``numel`` elements."""
        storage = DTYPE_STORAGE.get(dtype)
        flag = b"\x88" if requires_grad else b"\x89"
        self.data += b"ctorch._utils\n_rebuild_parameter\n(" if is_parameter else b""
        self.data += b"ctorch._utils\n_rebuild_tensor_v2\n((" if storage else b"ctorch._utils\n_rebuild_tensor_v3\n(("
        self.text("storage")
        self.data += f"ctorch\n{storage}\n".encode() if storage else b"ctorch.storage\nUntypedStorage\n"
        self.text(key)
        self.text(tag)
        self.data += push_int(numel if storage else numel * ITEM_BYTES[dtype]) + b"tQ"
        self.data += push_int(offset) + push_ints(shape) + push_ints(stride) + flag + _HOOKS
        self.data += b"tR" if storage else f"ctorch\n{dtype}\ntR".encode()
        self.data += flag + _HOOKS + b"tR" if is_parameter else b""


def push_int(number: int) -> bytes:
    """Return the operation that pushes a signed 64-bit integer."""
    return b"\x8a\x08" + struct.pack("<q", number)


def push_ints(numbers: Sequence[int]) -> bytes:
    """Return the operations that push a tuple of signed 64-bit integers."""
    return b"(" + b"".join(map(push_int, numbers)) + b"t"
