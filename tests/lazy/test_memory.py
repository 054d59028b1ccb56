"""Memory and work for tensors that are far larger than a tile."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import pytest

from ckptmove.lazy import cast, chunked, stored, strided
from ckptmove.lazy.cast import Cast
from ckptmove.lazy.chunked import Chunked
from ckptmove.lazy.stored import StoredBytes, Strided
from ckptmove.lazy.tensor import blocks
from ckptmove.lazy.views import permuted, reshaped
from ckptmove.model import Span

SIDE = 2048
TILE = 1 << 20


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Limits in proportion to a matrix of 16 MiB."""
    for module in (stored, chunked, cast):
        monkeypatch.setattr(module, "TILE", TILE)
    monkeypatch.setattr(strided, "_CHUNK", TILE // 4)
    monkeypatch.setattr(strided, "_GAP", 32)


class Zeros:
    """A source of zeros that counts what was read."""

    def __init__(self):
        self.nbytes = self.reads = 0

    def read_into(self, start, memory):
        self.nbytes += len(memory)
        self.reads += 1


def matrix(source, rows, columns, *, transposed=False):
    stride = (1, rows) if transposed else (columns, 1)
    nbytes = rows * columns * 4
    return Strided(StoredBytes(source, Span(0, nbytes), sys.byteorder), "float32", (rows, columns), stride)


def columns(source, *, transposed):
    width = SIDE // 16
    boxes = [((0, at), (SIDE, width)) for at in range(0, SIDE, width)]
    return Chunked((SIDE, SIDE), "float32", boxes, lambda place: matrix(source, SIDE, width, transposed=transposed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda source: matrix(source, SIDE, SIDE, transposed=True),
        lambda source: columns(source, transposed=False),
        lambda source: columns(source, transposed=True),
        lambda source: permuted(columns(source, transposed=False), (1, 0)),
        lambda source: Cast(matrix(source, SIDE, SIDE, transposed=True), "bfloat16"),
        lambda source: permuted(reshaped(matrix(source, SIDE, SIDE), (SIDE, 2, SIDE // 2)), (1, 2, 0)),
    ],
)
def test_memory_is_a_few_tiles(make) -> None:
    source = Zeros()
    tensor = make(source)
    tracemalloc.start()
    nbytes = sum(len(block) for block in blocks(tensor))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes == tensor.nbytes
    assert peak < 3 * TILE
    assert source.nbytes == SIDE * SIDE * 4
    assert source.reads < 60_000


def test_rows_in_files_are_read_in_small_blocks() -> None:
    source = Zeros()
    count = 4_000
    loaded = []

    def load(place):
        loaded.append(place)
        return matrix(source, 1, 512)

    boxes = [((place, 0), (1, 512)) for place in reversed(range(count))]
    tensor = Chunked((count, 512), "float32", boxes, load)
    tracemalloc.start()
    nbytes = sum(len(block) for block in blocks(tensor))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes == source.nbytes == tensor.nbytes
    assert loaded == [0, *reversed(range(count))]  # the first says in which blocks to read
    assert peak < TILE


def test_only_a_tensor_that_is_not_contiguous_imports_numpy() -> None:
    code = "import sys, ckptmove.lazy.views; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
