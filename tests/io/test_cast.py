"""Casts, held against torch's own ``Tensor.to``."""

from __future__ import annotations

import pytest
import torch

from ckptmove.errors import DamagedArchive
from ckptmove.io.cast import CAST_BLOCK, cast_blocks
from ckptmove.io.contracts import CastSegment
from ckptmove.model import Span

HARD = [0.0, -0.0, 1.0, 0.1, -1e300, 1e300, 1e-46, 5e-324, 16777217.0, 3.4028235677973366e38, float("inf"), -1e-40]


def cast(data, source, target, byteorder, block_bytes=CAST_BLOCK, overflowed=None):
    segment = CastSegment(Span(0, len(data)), source, target, byteorder, None)
    blocks = (memoryview(data)[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    return b"".join(cast_blocks(blocks, segment, "x.pt", overflowed))


def swap(data, item):
    return b"".join(data[start : start + item][::-1] for start in range(0, len(data), item))


@pytest.fixture(params=["hard", "random"])
def doubles(request):
    if request.param == "hard":
        return torch.tensor(HARD, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5000, dtype=torch.float64, generator=generator) * 1e30


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_float64_becomes_what_torch_makes_of_it(doubles, byteorder):
    before, after = doubles.numpy().tobytes(), doubles.to(torch.float32).numpy().tobytes()
    if byteorder == "big":
        before, after = swap(before, 8), swap(after, 4)
    assert cast(before, "float64", "float32", byteorder, 1600) == after


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_complex128_becomes_what_torch_makes_of_it(doubles, byteorder):
    pairs = torch.view_as_complex(doubles.reshape(-1, 2))
    before, after = pairs.numpy().tobytes(), pairs.to(torch.complex64).numpy().tobytes()
    if byteorder == "big":
        before, after = swap(before, 8), swap(after, 4)
    assert cast(before, "complex128", "complex64", byteorder) == after


def test_nan_stays_nan():
    data = torch.tensor([float("nan")], dtype=torch.float64).numpy().tobytes()
    after = cast(data, "float64", "float32", "little")
    assert torch.frombuffer(bytearray(after), dtype=torch.float32).isnan().all()


@pytest.mark.parametrize("byteorder", ["little", "big"])
def test_values_that_become_infinite_are_counted(doubles, byteorder):
    wide = doubles.to(torch.float32).isinf() & doubles.isfinite()
    before = doubles.numpy().tobytes()
    told = []
    cast(before if byteorder == "little" else swap(before, 8), "float64", "float32", byteorder, 16, told.append)
    assert sum(told) == int(wide.sum())
    cast(torch.ones(3, dtype=torch.float64).numpy().tobytes(), "float64", "float32", "little", 16, told.append)
    assert sum(told) == int(wide.sum())


def test_nothing_becomes_nothing():
    assert cast(b"", "float64", "float32", "little") == b""


@pytest.mark.parametrize(("dtype", "target", "nbytes"), [("float64", "float32", 12), ("complex128", "complex64", 24)])
def test_half_an_element_is_damage(dtype, target, nbytes):
    with pytest.raises(DamagedArchive, match=rf": {nbytes} bytes .* {dtype} "):
        cast(bytes(nbytes), dtype, target, "little")
