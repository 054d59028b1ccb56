from __future__ import annotations

import pytest
import torch

from ckptmove.checkpoint import elements
from ckptmove.checkpoint.elements import blocks, is_contiguous
from ckptmove.lazy.stored import StoredBytes
from ckptmove.model import Span, TensorRecord

RECORD = TensorRecord("w", "model", "cpu", "float32", (2, 3), (3, 1), "0", 0, 24)


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((1, 3), (99, 1), True),
        ((), (), True),
        ((3,), (2,), False),
        ((0, 3), (1, 9), True),
    ],
)
def test_contiguous_as_in_torch(shape, stride, expected):
    assert is_contiguous(RECORD._replace(shape=shape, stride=stride)) is expected
    assert torch.empty(500).as_strided(shape, stride).is_contiguous() is expected


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_a_large_strided_tensor_is_not_read_as_a_whole(monkeypatch, byteorder) -> None:
    monkeypatch.setattr(elements, "_MOST_READ", 1 << 20)
    matrix = torch.arange(1 << 20, dtype=torch.int32).view(1024, 1024)
    data = matrix.numpy().astype(">i4" if byteorder == "big" else "<i4").tobytes()
    reads = []

    class Source:
        def read(self, start, end):
            reads.append(end - start)
            return data[start:end]

    record = RECORD._replace(dtype="int32", shape=(512, 1024), stride=(1, 1024), nbytes=2 << 20)
    stored = StoredBytes(Source(), Span(0, len(data)), byteorder)
    found = list(blocks(stored, record, Span(0, len(data) - 2048), "little"))
    assert b"".join(found) == matrix.t()[:512].numpy().tobytes()
    assert {len(block) for block in found} == {4 * elements.BLOCK_ELEMENTS}
    assert max(reads) == 2048
    assert sum(reads) == 2 << 20
