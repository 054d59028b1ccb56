"""A tensor that is not in memory, and the evaluator that reads its elements in blocks."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from math import prod
from typing import TYPE_CHECKING, Final, Literal

from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Elements in a block; the largest element has 16 bytes.
BLOCK_ELEMENTS: Final = 1 << 16
#: Bytes of a tile: as much is read at once of a tensor whose shorter parts have their bytes far apart. In a transposed
#: matrix it is a strip of columns, and a wider strip has longer runs of bytes.
TILE: Final = 32 << 20
_SWAPPED: Final = 1 << 20
#: Formats of arrays by word size.
_WORDS: Final[dict[int, Literal["H", "I", "Q"]]] = {2: "H", 4: "I", 8: "Q"}


class LazyTensor(ABC):
    """A tensor that is not in memory."""

    shape: tuple[int, ...]
    dtype: str  # torch's name, without ``torch.``

    @abstractmethod
    def read_into(self, first: int, memory: memoryview) -> None:
        """Read elements from ``first`` on, counted in torch's order, until the memory is full.

        The memory has room for one element or more. Elements have the byte order of this machine. Errors are those of
        the sources. Threads may read at the same time.
        """

    @property
    def block_bytes(self) -> int:
        """Bytes to read at a time, for tensors of any size: in shorter parts, bytes of a source are read twice."""
        return BLOCK_ELEMENTS * self.item

    @property
    def item(self) -> int:
        """Size in bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes of the elements."""
        return self.numel * self.item


def blocks(tensor: LazyTensor, byteorder: Literal["little", "big"] = sys.byteorder) -> Iterator[memoryview]:
    """Read the elements of a tensor in order; each block but the last has ``BLOCK_ELEMENTS``.

    A block is valid until the next one is taken.
    """
    item, nbytes = tensor.item, tensor.nbytes
    step = BLOCK_ELEMENTS * item
    length = min(-(-tensor.block_bytes // step) * step, nbytes)
    memory = memoryview(bytearray(length))
    for start in range(0, nbytes, max(length, 1)):
        found = memory[: nbytes - start]
        tensor.read_into(start // item, found)
        if byteorder != sys.byteorder:
            swap(found, tensor.dtype)
        yield from (found[at : at + step] for at in range(0, len(found), step))


class Elements:
    """The elements of a tensor as a source of bytes: those of a contiguous storage."""

    def __init__(self, tensor: LazyTensor, byteorder: str = sys.byteorder) -> None:
        self.tensor, self.byteorder = tensor, byteorder

    def read(self, start: int, end: int) -> bytes:
        """Bytes from ``start`` to ``end`` (exclusive), both between two elements."""
        data = bytearray(end - start)
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, memory: memoryview) -> None:
        """Read bytes from ``start``, the first of an element, on until the memory is full."""
        self.tensor.read_into(start // self.tensor.item, memory)
        if self.byteorder != sys.byteorder:
            swap(memory, self.tensor.dtype)


def swap(memory: memoryview, dtype: str) -> None:
    """Change the byte order of elements in place."""
    word = ITEM_BYTES[dtype] // (2 if "complex" in dtype else 1)
    for start in range(0, len(memory) if word > 1 else 0, _SWAPPED):
        part = memory[start : start + _SWAPPED]
        words = array(_WORDS[word])
        words.frombytes(part)
        words.byteswap()
        part[:] = memoryview(words).cast("B")
