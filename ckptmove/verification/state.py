"""Tensors built from the bytes of a checkpoint as they lie in the file.

Never unpickles, and never reads more than the tensor that is asked for: large ones are mapped.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.dtypes import ITEM_BYTES
from ckptmove.errors import DamagedArchive, SourceChanged

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from ckptmove.containers.contract import Container
    from ckptmove.model import Span, TensorRecord

#: Below this a read is cheaper than a mapping.
_MAP_FROM_BYTES: Final = 2**17
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StoredTensors:
    """The tensors of one file, each built when it is asked for and gone when it is let go.

    Attributes:
        swaps: whether the file is in the other byte order than this machine.
    """

    def __init__(self, container: Container, *, mapped: bool = True) -> None:
        """Open the container's file once more.

        Args:
            container: says where the bytes of each storage lie.
            mapped: whether large tensors are mapped; otherwise every one is read into memory.
        """
        self._container = container
        self._mapped = mapped
        self._file = Path(container.source.path).open("rb", buffering=0)  # noqa: SIM115  # closed by __exit__
        self.swaps = container.byteorder != sys.byteorder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def span(self, record: TensorRecord) -> Span | None:
        """Where a dense tensor's bytes lie, from its first element to its last; None where they are not in the file.

        A tensor has none without a storage, with a storage that is not stored plainly, or one that is too short.
        """
        storage = None if record.storage is None else self._container.storage_span(record.storage)
        if storage is None:
            return None
        item = ITEM_BYTES[record.dtype]
        start = storage.start + record.storage_offset * item
        end = start + extent_elements(record.shape, record.stride) * item
        return type(storage)(start, end) if end <= storage.end else None

    def extent(self, span: Span, dtype: str) -> torch.Tensor:
        """The bytes of a span as a flat uint8 tensor, in this machine's byte order; the file is never written to.

        Args:
            span: what :meth:`span` returned.
            dtype: of its elements.

        Raises:
            SourceChanged: the file has become shorter.
        """
        if span.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        values = self._map(span) if self._is_mapped(span, dtype) else self._read(span)
        if self.swaps and ITEM_BYTES[dtype] > 1:
            storage: Any = values.untyped_storage()
            storage.byteswap(dtype_of(dtype))
        return values

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """A dense tensor with its dtype, sizes and strides, on the CPU.

        Raises:
            DamagedArchive: its bytes are not in the file, or not as they are in memory.
            SourceChanged: they are no longer there.
        """
        span = self.span(record)
        if span is None:
            raise DamagedArchive(self._container.source.path, f"'{record.name}' is not stored plainly and whole")
        values = torch.empty(0, dtype=dtype_of(record.dtype))
        return values.set_(self.extent(span, record.dtype).untyped_storage(), 0, record.shape, record.stride)

    def _is_mapped(self, span: Span, dtype: str) -> bool:
        aligned = span.start % ITEM_BYTES[dtype] == 0
        return self._mapped and aligned and not self.swaps and span.nbytes >= _MAP_FROM_BYTES

    def _map(self, span: Span) -> torch.Tensor:
        before = span.start % mmap.ALLOCATIONGRANULARITY
        if span.end > os.fstat(self._file.fileno()).st_size:
            raise SourceChanged(self._container.source.path)
        # A private copy on write: torch warns of a buffer that it could not write to.
        pages = mmap.mmap(
            self._file.fileno(), before + span.nbytes, access=mmap.ACCESS_COPY, offset=span.start - before
        )
        return torch.frombuffer(pages, dtype=torch.uint8, count=span.nbytes, offset=before)

    def _read(self, span: Span) -> torch.Tensor:
        buffer = bytearray(span.nbytes)
        self._file.seek(span.start)
        done = 0
        while done < span.nbytes:  # the system may give less than was asked for
            count = self._file.readinto(memoryview(buffer)[done:])
            if not count:
                raise SourceChanged(self._container.source.path)
            done += count
        return torch.frombuffer(buffer, dtype=torch.uint8)


def extent_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from a tensor's first to its last, gaps between them included; 0 for an empty one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


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
