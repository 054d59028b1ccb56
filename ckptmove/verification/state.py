"""Tensors built from the bytes of a checkpoint as they lie in the file.

Never unpickles, and never reads more than the tensor that is asked for: large ones are mapped. One file and many are
the same here: a storage's key says which it lies in.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from ckptmove.dtypes import ITEM_BYTES
from ckptmove.errors import AccessFailed, DamagedArchive, SourceChanged
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterable
    from io import FileIO
    from types import TracebackType

    from typing_extensions import Self

    from ckptmove.layouts.whole import StoredFile
    from ckptmove.model import TensorRecord

#: Below this a read is cheaper than a mapping.
_MAP_FROM_BYTES: Final = 2**17
#: A checkpoint may have thousands of files, and a process may open a thousand or so: its own, torch's and the mapped.
_MOST_OPEN: Final = 16
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Where bytes lie that are read as they are.

    Attributes:
        file: name of the file in the checkpoint.
        span: the bytes.
    """

    file: str
    span: Span


class StoredTensors:
    """The tensors of a checkpoint, each built when it is asked for and gone when it is let go."""

    def __init__(self, files: Iterable[StoredFile], *, mapped: bool = True) -> None:
        """Take down where the bytes of each storage lie.

        Args:
            files: of the checkpoint; each is opened once more when a tensor of it is asked for.
            mapped: whether large tensors are mapped; otherwise every one is read into memory.
        """
        self._files = {file.name: file for file in files}
        self._mapped = mapped
        self._open: dict[str, FileIO] = {}

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
        return frozenset(name for name, file in self._files.items() if not _swaps(file))

    def file_of(self, record: TensorRecord) -> StoredFile | None:
        """The file that a dense tensor's storage lies in; None where it has none."""
        return None if record.storage is None else self._file_at(record.storage)

    def place(self, record: TensorRecord) -> StoredBytes | None:
        """Where a dense tensor's bytes lie, from its first element to its last; None where they are not there.

        A tensor has none without a storage, with a storage that is not stored plainly, or one that is too short.
        """
        file = self.file_of(record)
        storage = None if file is None else file.span(cast("str", record.storage))
        if file is None or storage is None:
            return None
        item = ITEM_BYTES[record.dtype]
        start = storage.start + record.storage_offset * item
        end = start + extent_elements(record.shape, record.stride) * item
        return StoredBytes(file.name, Span(start, end)) if end <= storage.end else None

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """A dense tensor with its dtype, sizes and strides, on the CPU; no file is ever written to.

        Raises:
            DamagedArchive: its bytes are not in the file, or not as they are in memory.
            SourceChanged: they are no longer there.
            AccessFailed: the file cannot be opened any more.
        """
        place = self.place(record)
        if place is None:
            file = self.file_of(record) or next(iter(self._files.values()))
            raise DamagedArchive(file.path, f"'{record.name}' is not stored plainly and whole")
        values = torch.empty(0, dtype=dtype_of(record.dtype))
        return values.set_(self._extent(place, record.dtype).untyped_storage(), 0, record.shape, record.stride)

    def _file_at(self, key: str) -> StoredFile | None:
        """The file that a storage's key begins with, a slash after it: no file lies in another one."""
        if "" in self._files:
            return self._files[""]
        ends = (end for end, letter in enumerate(key) if letter == "/" and key[:end] in self._files)
        return next((self._files[key[:end]] for end in ends), None)

    def _extent(self, place: StoredBytes, dtype: str) -> torch.Tensor:
        """The bytes as a flat uint8 tensor, in this machine's byte order."""
        if place.span.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        file = self._files[place.file]
        swaps = _swaps(file) and ITEM_BYTES[dtype] > 1
        is_aligned = place.span.start % ITEM_BYTES[dtype] == 0
        is_mapped = self._mapped and is_aligned and not swaps and place.span.nbytes >= _MAP_FROM_BYTES
        values = self._map(file, place.span) if is_mapped else self._read(file, place.span)
        if swaps:
            storage: Any = values.untyped_storage()
            storage.byteswap(dtype_of(dtype))
        return values

    def _opened(self, file: StoredFile) -> FileIO:
        """A file, opened where it is not; the one that was opened first is let go where there are too many."""
        opened = self._open.get(file.name)
        if opened is None:
            if len(self._open) == _MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            try:
                opened = self._open[file.name] = Path(file.path).open("rb", buffering=0)  # noqa: SIM115  # closed by __exit__
            except OSError as error:
                raise AccessFailed(file.path, error.strerror or str(error)) from error
        return opened

    def _map(self, file: StoredFile, span: Span) -> torch.Tensor:
        number = self._opened(file).fileno()
        before = span.start % mmap.ALLOCATIONGRANULARITY
        if span.end > os.fstat(number).st_size:
            raise SourceChanged(file.path)
        # A private copy on write: torch warns of a buffer that it could not write to.
        pages = mmap.mmap(number, before + span.nbytes, access=mmap.ACCESS_COPY, offset=span.start - before)
        return torch.frombuffer(pages, dtype=torch.uint8, count=span.nbytes, offset=before)

    def _read(self, file: StoredFile, span: Span) -> torch.Tensor:
        opened = self._opened(file)
        buffer = bytearray(span.nbytes)
        opened.seek(span.start)
        done = 0
        while done < span.nbytes:  # the system may give less than was asked for
            count = opened.readinto(memoryview(buffer)[done:])
            if not count:
                raise SourceChanged(file.path)
            done += count
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _swaps(file: StoredFile) -> bool:
    """Whether a file is in the other byte order than this machine."""
    return file.container.byteorder != sys.byteorder


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
