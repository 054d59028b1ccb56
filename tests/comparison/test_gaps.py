"""The largest gap between values, and NaN on one side alone; the oracle is torch's ``isnan``, for every dtype."""

from __future__ import annotations

import math

import pytest
import torch

from ckptmove.comparison import gaps
from ckptmove.comparison.differences import Gap, LoneNan
from ckptmove.proof.tensors.magnitude import measure
from ckptmove.torch_facts.dtypes import ITEM_BYTES

SINGLE = [
    "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def raw(tensor):
    return bytes(tensor.untyped_storage())


def patterns(dtype):
    """Every upper half of a number, with a lower half of zero and of a small value."""
    item = ITEM_BYTES[dtype]
    if item == 1:
        return bytes(range(256))
    return b"".join(low + high.to_bytes(2, "little") for high in range(1 << 16) for low in _lows(item - 2))


def _lows(size):
    return dict.fromkeys((bytes(size), (1).to_bytes(size, "little") if size else b""))


@pytest.mark.parametrize("dtype", SINGLE)
def test_what_is_nan_is_what_torch_says(dtype):
    block = patterns(dtype)
    tensor = torch.frombuffer(bytearray(block), dtype=getattr(torch, dtype))
    assert list(gaps._nan_flags(block, dtype)) == tensor.to(torch.float64).isnan().int().tolist()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ["complex32", "complex64", "complex128"])
def test_a_complex_number_is_nan_where_a_part_is(dtype):
    values = [complex(*pair) for pair in ((1, 2), (math.nan, 1), (1, math.nan), (math.inf, 0))]
    assert list(gaps._nan_flags(raw(torch.tensor(values).to(getattr(torch, dtype))), dtype)) == [0, 1, 1, 0]


def test_integers_are_never_nan():
    assert list(gaps._nan_flags(b"\xff" * 8, "int32")) == [0, 0]


def of(first, second):
    """Result for tensors that are compared two elements at a time."""
    dtypes = [str(side.dtype).removeprefix("torch.") for side in (first, second)]
    blocks = [[raw(part.clone()) for part in side.split(2)] for side in (first, second)]
    return gaps.gap_between(zip(*blocks, strict=True), *dtypes, measure)


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [1, NAN, 3, 5], Gap(INF, INF, LoneNan(0, 1, 4, 1.0, 0.2))),
        ([NAN, 2, NAN, 4], [1, 2, NAN, NAN], Gap(INF, INF, LoneNan(1, 1, 4, 0.0, 0.0))),
        ([1, 1, 8, 8], [NAN, NAN, 8, 4], Gap(INF, INF, LoneNan(0, 2, 4, 4.0, 0.5))),
        ([1, 1, 1], [NAN, INF, 1], Gap(INF, INF, LoneNan(0, 1, 3, INF, INF))),
        ([1, 1, 1], [1, INF, 1], Gap(INF, INF)),
        ([NAN, 1, 1], [NAN, 3, 1], Gap(2.0, 2 / 3)),
    ],
)
def test_nan_on_one_side_is_counted_and_the_others_are_measured(first, second, expected):
    assert of(torch.tensor(first), torch.tensor(second)) == (True, expected)


def test_nan_beside_another_dtype():
    gap = Gap(INF, INF, LoneNan(1, 0, 2, 1.0, 0.5))
    assert of(torch.tensor([NAN, 1.0], dtype=torch.bfloat16), torch.tensor([1, 2])) == (True, gap)
