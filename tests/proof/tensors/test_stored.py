"""Comparison of the bits of tensors."""

from __future__ import annotations

import pytest
import torch

from ckptmove.proof.tensors.stored import bits, same_bits, same_integers


def test_bits_tell_zeros_apart_and_not_nans():
    nan = torch.tensor(float("nan"))
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert bits(torch.ones(2, dtype=torch.complex128)).dtype == torch.int64


@pytest.mark.parametrize("start", [0, 3])
def test_bytes_are_compared_wherever_they_lie(start):
    whole = torch.arange(40, dtype=torch.uint8)
    assert same_integers(whole[start : start + 19], whole[start : start + 19].clone())
    changed = whole[start : start + 19].clone()
    changed[18] = 99
    assert not same_integers(whole[start : start + 19], changed)
    assert not same_integers(whole[:3], whole[:4])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("place", range(7))
def test_each_element_counts(dtype, start, place):
    values = torch.arange(9).to(dtype)[start : start + 7]
    changed = values.clone()
    assert same_bits(values, changed)
    changed[place] = ~changed[place] if dtype == torch.bool else -7
    assert not same_bits(values, changed)


def test_shapes_are_compared():
    assert not same_bits(torch.ones(2, 3), torch.ones(6))
    assert same_bits(torch.ones(2, 3).T, torch.ones(3, 2))


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((8, 1), (5, 1)), ((8,), (5,)), ((1,), (5,)), ((6,), (0,)), ((2, 4), (1, 2)), ((0, 3), (3, 1))],
)
def test_strided_tensors_are_compared(shape, stride):
    values = torch.arange(64.0).as_strided(shape, stride)
    for other in (values.clone(), values.contiguous()):
        assert same_bits(values, other)
        assert same_bits(other, values)
    if values.numel():
        changed = values.clone()
        changed[(-1,) * len(shape)] = -7
        assert not same_bits(values, changed)
