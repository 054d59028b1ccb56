"""Build a pickle like that of ``torch.save`` for a ``torch.export`` archive, and read devices back from it.

The pickle is never written to a file. A plan edits it as any other pickle; the edited devices then go into the JSON.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from ckptmove.pickles.scan import operations
from ckptmove.torch_facts.devices import split
from ckptmove.torch_facts.dtypes import DTYPE_STORAGE, ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.formats.export_json import ExportDevice, ExportJson

#: BINUNICODE; and the opcodes of small numbers: BININT1, BININT2, BININT.
_TEXT: Final = ord("X")
_TEXT_HEAD: Final = 5
_NUMBERS: Final = frozenset(b"KMJ")
_HOOKS: Final = b"ccollections\nOrderedDict\n)R"


class ExportPickle:
    """A pickle under construction.

    Attributes:
        data: its bytes so far.
        slots: for each device in it: index of its string in the pickle, its tag, and its places in the JSON.
    """

    def __init__(self) -> None:
        self.data = bytearray(b"\x80\x02")
        self.slots: list[tuple[int, str, tuple[tuple[ExportJson, int], ...]]] = []
        self._strings = 0

    def text(self, text: str) -> None:
        """Push a string."""
        raw = text.encode("utf-8", "surrogatepass")
        self.data += b"X" + struct.pack("<I", len(raw)) + raw
        self._strings += 1

    def call(self, name: str, text: str) -> None:
        """Push the result of a function of torch with one string as its argument."""
        self.data += b"ctorch\n" + name.encode() + b"\n("
        self.text(text)
        self.data += b"tR"

    def device(self, tag: str, places: Sequence[tuple[ExportJson, ExportDevice]]) -> None:
        """Push a ``torch.device``, as Python pickles one."""
        kind, index = split(tag)
        self.data += b"ctorch\ndevice\n"
        self._tag(kind, tag, places)
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
        places: Sequence[tuple[ExportJson, ExportDevice]],
    ) -> None:
        """Push a dense tensor.

        Args:
            key: key of its storage.
            tag: tag of the device of its storage.
            dtype: torch's name without ``torch.``.
            numel: number of elements of the storage.
            offset: of the tensor in the storage, in elements.
            shape: its sizes.
            stride: its strides, in elements.
            requires_grad: as saved.
            is_parameter: whether it is a Parameter.
            places: places of the device in the JSON.
        """
        storage = DTYPE_STORAGE.get(dtype)
        flag = b"\x88" if requires_grad else b"\x89"
        self.data += b"ctorch._utils\n_rebuild_parameter\n(" if is_parameter else b""
        self.data += b"ctorch._utils\n_rebuild_tensor_v2\n((" if storage else b"ctorch._utils\n_rebuild_tensor_v3\n(("
        self.text("storage")
        self.data += f"ctorch\n{storage}\n".encode() if storage else b"ctorch.storage\nUntypedStorage\n"
        self.text(key)
        self._tag(tag, tag, places)
        self.data += push_int(numel if storage else numel * ITEM_BYTES[dtype]) + b"tQ"
        self.data += push_int(offset) + push_ints(shape) + push_ints(stride) + flag + _HOOKS
        self.data += b"tR" if storage else f"ctorch\n{dtype}\ntR".encode()
        self.data += flag + _HOOKS + b"tR" if is_parameter else b""

    def _tag(self, text: str, tag: str, places: Sequence[tuple[ExportJson, ExportDevice]]) -> None:
        self.slots.append((self._strings, tag, tuple((record, device.place) for record, device in places)))
        self.text(text)


def tags_of(data: bytes, strings: Iterable[int]) -> Iterator[str]:
    """The devices in a pickle, edited or not.

    Args:
        data: the pickle.
        strings: indices of the strings that start the devices, in order.
    """
    wanted = iter((*strings, -1))
    place, count, text = next(wanted), 0, ""
    for start, end, opcode in operations(data):
        if text:
            yield f"{text}:{int.from_bytes(data[start + 1 : end], 'little')}" if opcode in _NUMBERS else text
            text = ""
        if opcode == _TEXT:
            if count == place:
                text, place = data[start + _TEXT_HEAD : end].decode("utf-8", "surrogatepass"), next(wanted)
            count += 1


def push_int(number: int) -> bytes:
    """Return the operation that pushes a signed 64-bit integer."""
    return b"\x8a\x08" + struct.pack("<q", number)


def push_ints(numbers: Sequence[int]) -> bytes:
    """Return the operations that push a tuple of signed 64-bit integers."""
    return b"(" + b"".join(map(push_int, numbers)) + b"t"
