"""Shapes and strides, compared with torch."""

from __future__ import annotations

import pytest
import torch

from ckptmove.lazy.geometry import is_contiguous


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
    assert is_contiguous(shape, stride) is expected
    assert torch.empty(500).as_strided(shape, stride).is_contiguous() is expected
