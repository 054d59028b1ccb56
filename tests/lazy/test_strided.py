"""Elements of strided tensors, compared with torch, with tiles and chunks of a few bytes."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.lazy import stored, strided, tensor
from ckptmove.lazy.stored import StoredBytes, Strided
from ckptmove.lazy.tensor import blocks
from ckptmove.model import Span

AXES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), min_size=1, max_size=4)


class Reads:
    """The bytes of a tensor, and the spans that were read."""

    def __init__(self, tensor):
        self.data = tensor.numpy().tobytes()
        self.spans = []

    def read(self, start, end):
        assert 0 <= start < end <= len(self.data)
        self.spans.append((start, end))
        return self.data[start:end]

    @property
    def nbytes(self):
        return sum(end - start for start, end in self.spans)


def elements(reads, start, shape, stride, item):
    dtype = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}[item]
    storage = StoredBytes(reads, Span(0, len(reads.data)), sys.byteorder)
    return b"".join(map(bytes, blocks(Strided(storage, dtype, shape, stride, start))))


@pytest.fixture
def small(monkeypatch):
    """Limits in proportion to tensors of a few kilobytes."""
    monkeypatch.setattr(stored, "TILE", 512)
    monkeypatch.setattr(strided, "_CHUNK", 96)
    monkeypatch.setattr(strided, "_GAP", 8)
    monkeypatch.setattr(tensor, "BLOCK_ELEMENTS", 4)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.int64, torch.complex128])
@given(axes=AXES, start=st.integers(0, 9))
def test_elements_in_the_order_of_torch(dtype, axes, start) -> None:
    shape, stride = zip(*axes, strict=True)
    storage = torch.arange(900).remainder(251).to(dtype)
    reads = Reads(storage)
    expected = Reads(storage.as_strided(shape, stride, start)).data
    assert elements(reads, start, shape, stride, dtype.itemsize) == expected


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("columns", [32, 128])
def test_a_transposed_matrix_is_read_once(columns) -> None:
    matrix = torch.arange(16 * columns, dtype=torch.int32).view(16, columns)
    reads = Reads(matrix)
    assert elements(reads, 0, (columns, 16), (1, columns), 4) == Reads(matrix.t()).data
    assert reads.nbytes == len(reads.data)
    assert len(reads.spans) == 16 * len(reads.data) // 512  # a run for each row and tile


@pytest.mark.usefixtures("small")
def test_short_gaps_are_read() -> None:
    storage = torch.arange(400, dtype=torch.int32)
    reads = Reads(storage)
    assert elements(reads, 0, (100,), (2,), 4) == Reads(storage[:200:2]).data
    assert reads.nbytes < 2 * len(storage[:200:2]) * 4
    assert max(end - start for start, end in reads.spans) <= 96


@pytest.mark.parametrize("shape", [(4096, 4096), (1 << 18, 64)])
def test_a_large_matrix_is_read_in_chunks(shape) -> None:
    matrix = torch.arange(1 << 24, dtype=torch.int32).view(shape)
    reads = Reads(matrix)
    assert elements(reads, 0, (shape[1], shape[0]), (1, shape[1]), 4) == Reads(matrix.t()).data
    assert max(end - start for start, end in reads.spans) <= 8 << 20
    assert reads.nbytes <= 2 * len(reads.data)
    assert len(reads.spans) <= 8192
