"""Build tensors from the stored bytes of a checkpoint.

Nothing is unpickled, and only the bytes of the requested elements are read. Large tensors are mapped. A checkpoint may
have several files; a storage's key names its file.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import sys
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch

from ckptmove.checkpoint.elements import extent_span
from ckptmove.checkpoint.parts import RANKS_MISSING
from ckptmove.errors import DamagedArchive, MissingShard, SourceChanged
from ckptmove.io.part import read_into
from ckptmove.lazy.geometry import extent_numel
from ckptmove.model import Span
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.torch_facts.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from io import FileIO

    from typing_extensions import Self

    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.io.source import DiskPlace
    from ckptmove.lazy.stored import StoredBytes
    from ckptmove.model import TensorRecord
    from ckptmove.proof.tensors.pieces import Window

#: Reading fewer bytes is cheaper than mapping them.
_MAP_FROM_BYTES: Final = 2**17
#: Open files. A checkpoint may have thousands; the limit of a process is about a thousand, shared with torch's.
_MOST_OPEN: Final = 16
#: Bytes of the tensors that are kept, and their number: those of a batch of parameters with their moments.
_KEPT_BYTES: Final = 2**24
_MOST_KEPT: Final = 2**11
#: Tensors that are kept whole if they cannot be read in runs: a parameter and its moments.
_MOST_WHOLE: Final = 4
#: Bytes read at once; a multiple of every element size.
_BLOCK_BYTES: Final = 2**21


class StoredExtent(NamedTuple):
    """Location of a tensor's bytes, from its first element to its last."""

    file: str  # name of the file in the checkpoint
    span: Span  # byte range
    #: name of the tensor that the range is relative to, if each tensor has its own byte count; else empty.
    tensor: str = ""


class StoredTensors:
    """The tensors of a checkpoint as stored, each built on request."""

    def __init__(self, parts: Iterable[OpenPart], *, mapped: bool = True, keeps: bool = False) -> None:
        """Begin with no file open.

        Args:
            parts: parts of the checkpoint; a file is opened again for its first tensor.
            mapped: whether to map large tensors; otherwise all tensors are read into memory.
            keeps: whether to keep the last tensors, which must not be written to: a step reads each several times.
        """
        self._parts = {part.name: part for part in parts}
        self._mapped, self._keeps = mapped, keeps
        self._open: dict[str, FileIO] = {}
        self._kept: OrderedDict[tuple[StoredExtent, str], torch.Tensor] = OrderedDict()
        self._kept_bytes = 0
        #: Of any size: the next run is cut from them.
        self._whole = lru_cache(_MOST_WHOLE if keeps else 0)(self.tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        self._whole.cache_clear()
        for file in self._open.values():
            file.close()

    @property
    def native(self) -> frozenset[str]:
        """Names of the files in this machine's byte order."""
        return frozenset(name for name, part in self._parts.items() if not _swaps(part))

    def part_of(self, record: TensorRecord) -> OpenPart | None:
        """The part that contains a dense tensor's storage; None if it has no storage."""
        return None if record.storage is None else self._part_at(record.storage)

    def place(self, record: TensorRecord) -> StoredExtent | None:
        """Location of a dense tensor's bytes, from its first element to its last.

        None if the tensor has no storage, or if the storage is encoded or too short.
        """
        part = self.part_of(record)
        key = None if part is None else part.own_key(record)
        if part is None or key is None:
            return None
        storage = part.span(key)
        if storage is None:
            return None
        span = extent_span(storage, record)
        return None if span is None else StoredExtent(part.name, span, key if part.disk is None else "")

    def tensor(self, record: TensorRecord, window: Window | None = None) -> torch.Tensor:
        """Build a dense tensor with its dtype, sizes and strides on the CPU. Writing to it never changes the file."""
        if window is not None:
            run = window.of(record)
            return window.cut(self._whole(record)) if run is None else self.tensor(run)
        place = self.place(record)
        if place is None:
            part = self.part_of(record) or next(iter(self._parts.values()))
            if part.missing:
                raise MissingShard(part.path, part.missing[0], len(part.missing) - 1, RANKS_MISSING)
            raise DamagedArchive(part.path, f"'{record.name}' is encoded or incomplete")
        values = torch.empty(0, dtype=dtype_of(record.dtype))
        return values.set_(self._extent(place, record).untyped_storage(), 0, record.shape, record.stride)

    def digests(self, part: OpenPart) -> dict[str, bytes]:
        """SHA-256 of each complete storage of a part, by storage key."""
        found: dict[str, bytes] = {}
        for storage in part.inventory.storages:
            own = part.own_name(storage.key)
            span = part.span(own)
            if span is not None and storage.nbytes <= span.nbytes:
                hashed = hashlib.sha256()
                for block in _blocks(span.start, span.start + storage.nbytes):
                    hashed.update(self.read(part, own, block))
                found[storage.key] = hashed.digest()
        return found

    def _part_at(self, key: str) -> OpenPart | None:
        """The part named by the beginning of a storage key, before a slash; files may be in folders of other parts."""
        ends = (end for end in range(len(key) - 1, 0, -1) if key[end] == "/" and key[:end] in self._parts)
        return next((self._parts[key[:end]] for end in ends), self._parts.get(""))

    def _extent(self, place: StoredExtent, record: TensorRecord) -> torch.Tensor:
        """Bytes as a flat uint8 tensor, in this machine's byte order."""
        if not self._keeps:
            return self._read_extent(place, record)
        values = self._kept.pop((place, record.dtype), None)
        if values is None:
            values = self._read_extent(place, record)
        else:
            self._kept_bytes -= values.nbytes
        if values.nbytes <= _KEPT_BYTES:
            self._kept[place, record.dtype] = values
            self._kept_bytes += values.nbytes
        while self._kept_bytes > _KEPT_BYTES or len(self._kept) > _MOST_KEPT:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes
        return values

    def _read_extent(self, place: StoredExtent, record: TensorRecord) -> torch.Tensor:
        if place.span.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        part, item = self._parts[place.file], ITEM_BYTES[record.dtype]
        swaps, is_large = _swaps(part) and item > 1, place.span.nbytes >= _MAP_FROM_BYTES
        disk = part.disk
        if disk is not None and self._mapped and is_large and not swaps:
            span = _on_disk(disk, place.span)
            if span.start % item == 0:
                return self._map(disk, span)
        values = torch.empty(place.span.nbytes, dtype=torch.uint8)
        storage: Any = values.untyped_storage()
        self.read_into(part, cast("str", part.own_key(record)), place.span, memory_of(storage))
        if swaps:
            storage.byteswap(dtype_of(record.dtype))
        return values

    def read(self, part: OpenPart, key: str, span: Span) -> bytearray:
        """Read bytes of a part's storage into memory; errors as of :meth:`tensor`."""
        buffer = bytearray(span.nbytes)
        self.read_into(part, key, span, memoryview(buffer))
        return buffer

    def read_into(self, part: OpenPart, key: str, span: Span, buffer: memoryview) -> None:
        """Read bytes of a part's storage into a buffer of their size; errors as of :meth:`tensor`."""
        disk = part.disk
        if disk is None:
            source = cast("StoredBytes", part.storage(key)).source  # a span of it is known
            for block in _blocks(span.start, span.end):
                read_into(source, block.start, buffer[block.start - span.start : block.end - span.start])
        else:
            self._read_file(disk, _on_disk(disk, span), buffer)

    def _opened(self, disk: DiskPlace) -> FileIO:
        """Open a file, or return it if it is open; the oldest one is closed if too many are."""
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
        # Private copy on write, because torch warns of buffers that are not writable.
        pages = mmap.mmap(number, before + span.nbytes, access=mmap.ACCESS_COPY, offset=span.start - before)
        return torch.frombuffer(pages, dtype=torch.uint8, count=span.nbytes, offset=before)

    def _read_file(self, disk: DiskPlace, span: Span, buffer: memoryview) -> None:
        opened = self._opened(disk)
        opened.seek(span.start)
        done = 0
        while done < span.nbytes:  # the system may return fewer bytes than requested
            count = opened.readinto(buffer[done:])
            if not count:
                raise SourceChanged(disk.path)
            done += count


def _on_disk(disk: DiskPlace, span: Span) -> Span:
    """Convert a byte range of a part to one of its file."""
    return Span(disk.start + span.start, disk.start + span.end)


def _swaps(part: OpenPart) -> bool:
    """Whether the byte order of a part differs from this machine's."""
    return part.byteorder != sys.byteorder


def memory_of(storage: Any) -> memoryview:
    """The memory of a storage on the CPU, valid as long as the storage."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _blocks(start: int, end: int) -> Iterator[Span]:
    return (Span(first, min(first + _BLOCK_BYTES, end)) for first in range(start, end, _BLOCK_BYTES))


def distinct(values: torch.Tensor) -> torch.Tensor:
    """A view of all values of a tensor, in any shape; values of an expanded tensor occur once.

    A tensor that overlaps itself in another way is returned with its gaps.
    """
    numel = extent_numel(tuple(values.shape), tuple(values.stride()))
    for dimension, step in enumerate(values.stride()):
        if not step and values.shape[dimension] > 1:
            values = values.narrow(dimension, 0, 1)
    return values if values.numel() <= numel else values.as_strided((numel,), (1,))


def without_padding(tensor: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    """A loaded tensor in the length of its record: the state of a ZeRO partition is saved with padding."""
    is_padded = len(record.shape) == tensor.dim() == 1 and record.shape[0] < tensor.numel()
    return tensor[: record.shape[0]] if is_padded else tensor
