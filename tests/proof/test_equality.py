"""Comparison of two tensors, bit for bit and within a tolerance."""

from __future__ import annotations

import pytest
import torch

from ckptmove.proof.equality import bits, difference, other_form, same_bits, same_integers


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


@pytest.mark.parametrize(
    ("value", "reference", "exact", "text"),
    [
        (torch.ones(3), torch.ones(3), True, ""),
        (torch.ones(3), torch.ones(3) + 1e-6, False, ""),
        (torch.ones(3), torch.ones(3) + 1e-6, True, " in 3 of 3 elements, by up to"),
        (torch.ones(3), torch.tensor([1.0, 1.5, 1.0]), False, " in 1 of 3 elements, by up to 0.5"),
        (torch.tensor([1j, 2]), torch.tensor([0j, 2]), True, " in 1 of 2 elements, by up to 1"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False, " in 1 of 2 elements, by up to 1"),
        (torch.ones(3), torch.ones(3).double(), False, ": dtype torch.float32 in place of torch.float64"),
        (torch.ones(3), torch.ones(1, 3), False, ": shape (3,) in place of (1, 3)"),
        (torch.ones(0), torch.ones(0), True, ""),
    ],
)
def test_a_difference_is_counted_and_measured(value, reference, exact, text):
    found = difference(value, reference, exact=exact)
    assert found.startswith(text)
    assert bool(found) is bool(text)


def test_strides_are_compared_if_there_are_any():
    value = torch.ones(2, 3).T
    assert not other_form(value, torch.float32, (3, 2))
    assert other_form(value, torch.float32, (3, 2), (2, 1)) == "stride (1, 3) in place of (2, 1)"
