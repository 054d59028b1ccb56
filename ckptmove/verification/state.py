"""Tensors built from the bytes of a checkpoint as they lie in it.

Never unpickles, and never reads more than the tensor that is asked for: large ones are mapped, or kept for a while
where they cannot be. One file and many are the same here: a storage's key says which it lies in.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch

from ckptmove.errors import DamagedArchive, SourceChanged
from ckptmove.model import Span
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import FileIO
    from types import TracebackType

    from typing_extensions import Self

    from ckptmove.checkpoint import elements
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.io.source import DiskPlace
    from ckptmove.model import TensorRecord

#: Below this a read is cheaper than a mapping.
_MAP_FROM_BYTES: Final = 2**17
#: A checkpoint may have thousands of files, and a process may open a thousand or so: its own, torch's and the mapped.
_MOST_OPEN: Final = 16
#: Large tensors that are kept where they cannot be mapped: a parameter with its moments is cut into many windows.
_MOST_KEPT: Final = 4
#: As much is put together at once: a multiple of the size of any element.
_BLOCK_BYTES: Final = 2**20
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StoredBytes(NamedTuple):
    """Where bytes lie that are read as they are.

    Attributes:
        file: name of the file in the checkpoint.
        span: the bytes.
        tensor: whose bytes the span counts, where each tensor's are counted by themselves; else empty.
    """

    file: str
    span: Span
    tensor: str = ""


class StoredTensors:
    """The tensors of a checkpoint, each built when it is asked for and gone when it is let go."""

    def __init__(self, parts: Iterable[OpenPart], *, mapped: bool = True) -> None:
        """Take down where the bytes of each storage lie.

        Args:
            parts: of the checkpoint; a file is opened once more when a tensor of it is asked for.
            mapped: whether large tensors are mapped; otherwise every one is read into memory.
        """
        self._parts = {part.name: part for part in parts}
        self._mapped = mapped
        self._open: dict[str, FileIO] = {}
        self._kept: dict[tuple[StoredBytes, str], torch.Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()

    @property
    def native(self) -> frozenset[str]:
        """Names of the files in this machine's byte order."""
        return frozenset(name for name, part in self._parts.items() if not _swaps(part))

    def part_of(self, record: TensorRecord) -> OpenPart | None:
        """The part that a dense tensor's storage lies in; None where it has none."""
        return None if record.storage is None else self._part_at(record.storage)

    def place(self, record: TensorRecord) -> StoredBytes | None:
        """Where a dense tensor's bytes lie, from its first element to its last; None where they are not there.

        A tensor has none without a storage, with a storage that is not stored plainly, or one that is too short.
        """
        part = self.part_of(record)
        key = None if part is None else part.own_key(record)
        storage = None if part is None or key is None else part.span(key)
        if part is None or key is None or storage is None:
            return None
        item = ITEM_BYTES[record.dtype]
        start = storage.start + record.storage_offset * item
        end = start + extent_elements(record.shape, record.stride) * item
        whose = key if part.is_distributed else ""
        return StoredBytes(part.name, Span(start, end), whose) if end <= storage.end else None

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """A dense tensor with its dtype, sizes and strides, on the CPU; no file is ever written to.

        Raises:
            DamagedArchive: its bytes are not in the file, or not as they are in memory.
            SourceChanged: they are no longer there.
            AccessFailed: the file cannot be opened any more.
            UnreadableInput: a piece of it is not what it should be.
        """
        place = self.place(record)
        if place is None:
            part = self.part_of(record) or next(iter(self._parts.values()))
            raise DamagedArchive(part.path, f"'{record.name}' is not stored plainly and whole")
        values = torch.empty(0, dtype=dtype_of(record.dtype))
        return values.set_(self._extent(place, record).untyped_storage(), 0, record.shape, record.stride)

    def digests(self, part: OpenPart) -> dict[str, bytes]:
        """The SHA-256 of each storage of a part, as it lies there, by its key; none of one that is not there whole.

        Raises:
            As :meth:`tensor`.
        """
        found: dict[str, bytes] = {}
        for storage in part.inventory.storages:
            own = part.own_name(storage.key)
            span = part.span(own)
            if span is not None and storage.nbytes <= span.nbytes:
                hashed = hashlib.sha256()
                for block in _blocks(span.start, span.start + storage.nbytes):
                    hashed.update(self._bytes(part, own, block))
                found[storage.key] = hashed.digest()
        return found

    def _part_at(self, key: str) -> OpenPart | None:
        """The part that a storage's key begins with, a slash after it; files may lie in the folder of another one."""
        ends = (end for end in range(len(key) - 1, 0, -1) if key[end] == "/" and key[:end] in self._parts)
        return next((self._parts[key[:end]] for end in ends), self._parts.get(""))

    def _extent(self, place: StoredBytes, record: TensorRecord) -> torch.Tensor:
        """The bytes as a flat uint8 tensor, in this machine's byte order."""
        if place.span.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        part, item = self._parts[place.file], ITEM_BYTES[record.dtype]
        swaps, is_large = _swaps(part) and item > 1, place.span.nbytes >= _MAP_FROM_BYTES
        disk = part.disk
        if disk is not None and self._mapped and is_large and not swaps:
            span = _on_disk(disk, place.span)
            if span.start % item == 0:
                return self._map(disk, span)
        values = self._kept.pop((place, record.dtype), None)
        if values is None:
            if len(self._kept) == _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            values = torch.frombuffer(
                self._bytes(part, cast("str", part.own_key(record)), place.span), dtype=torch.uint8
            )
            if swaps:
                storage: Any = values.untyped_storage()
                storage.byteswap(dtype_of(record.dtype))
        if is_large:
            self._kept[place, record.dtype] = values
        return values

    def _bytes(self, part: OpenPart, key: str, span: Span) -> bytearray:
        """Bytes of a storage of a part, read into memory."""
        disk = part.disk
        return _gathered(part, key, span) if disk is None else self._read(disk, _on_disk(disk, span))

    def _opened(self, disk: DiskPlace) -> FileIO:
        """A file as it was read, opened where it is not; there are a few, and the first one is let go."""
        opened = self._open.get(disk.path)
        if opened is None:
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            opened = self._open[disk.path] = disk.open()
        disk.require_unchanged(opened.fileno())
        return opened

    def _map(self, disk: DiskPlace, span: Span) -> torch.Tensor:
        number = self._opened(disk).fileno()
        before = span.start % mmap.ALLOCATIONGRANULARITY
        if span.end > os.fstat(number).st_size:
            raise SourceChanged(disk.path)
        # A private copy on write: torch warns of a buffer that it could not write to.
        pages = mmap.mmap(number, before + span.nbytes, access=mmap.ACCESS_COPY, offset=span.start - before)
        return torch.frombuffer(pages, dtype=torch.uint8, count=span.nbytes, offset=before)

    def _read(self, disk: DiskPlace, span: Span) -> bytearray:
        opened = self._opened(disk)
        buffer = bytearray(span.nbytes)
        opened.seek(span.start)
        done = 0
        while done < span.nbytes:  # the system may give less than was asked for
            count = opened.readinto(memoryview(buffer)[done:])
            if not count:
                raise SourceChanged(disk.path)
            done += count
        return buffer


def _on_disk(disk: DiskPlace, span: Span) -> Span:
    """Where bytes of a part lie in the file that has them."""
    return Span(disk.start + span.start, disk.start + span.end)


def _swaps(part: OpenPart) -> bool:
    """Whether a part is in the other byte order than this machine."""
    return part.byteorder != sys.byteorder


def _gathered(part: OpenPart, key: str, span: Span) -> bytearray:
    """Bytes that lie nowhere on the disk in one run, or not as they are."""
    stored = cast("elements.StoredBytes", part.storage(key))  # a span of it is known
    buffer = bytearray(span.nbytes)
    for block in _blocks(span.start, span.end):
        buffer[block.start - span.start : block.end - span.start] = stored.source.read(block.start, block.end)
    return buffer


def _blocks(start: int, end: int) -> Iterator[Span]:
    """A run of bytes in pieces that are read at once."""
    return (Span(first, min(first + _BLOCK_BYTES, end)) for first in range(start, end, _BLOCK_BYTES))


def extent_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from a tensor's first to its last, gaps between them included; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def overlaps(record: TensorRecord) -> bool:
    """Whether several elements of a dense tensor are one and the same in memory."""
    return math.prod(record.shape) > extent_elements(record.shape, record.stride)


def distinct(values: torch.Tensor) -> torch.Tensor:
    """All values of a tensor as a view, of one that is expanded or lies over itself each just once, whatever its shape.

    What lies over itself otherwise than by expansion is taken with the gaps that it may have.
    """
    extent = extent_elements(tuple(values.shape), tuple(values.stride()))
    for dimension, step in enumerate(values.stride()):
        if not step and values.shape[dimension] > 1:
            values = values.narrow(dimension, 0, 1)
    return values if values.numel() <= extent else values.as_strided((extent,), (1,))


def dtype_of(name: str) -> torch.dtype:
    """The dtype of torch for a name without ``torch.``.

    Raises:
        AttributeError: this torch is too old to know it.
    """
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as integers, so that equal means equal bits: NaN equals itself, -0.0 is not 0.0."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.reshape(-1).view(_INTEGERS[flat.element_size()])
