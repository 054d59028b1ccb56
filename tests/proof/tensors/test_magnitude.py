"""The gap between integers and floating-point numbers that float64 cannot represent."""

from __future__ import annotations

import pytest
import torch

from ckptmove.comparison.differences import Gap
from ckptmove.proof.tensors.magnitude import measure

LARGE = 2**53


def raw(tensor):
    return bytes(tensor.untyped_storage()), str(tensor.dtype).removeprefix("torch.")


@pytest.mark.parametrize("whole", [torch.int64, torch.uint64])
@pytest.mark.parametrize(
    ("integers", "numbers", "gap"),
    [
        ([5, LARGE + 1], torch.tensor([5, LARGE], dtype=torch.float64), (1.0, 1 / LARGE)),
        ([5, LARGE], torch.tensor([5, LARGE], dtype=torch.float64), (0.0, 0.0)),
        ([5, 2**63 - 1], torch.tensor([5.0, 2.0**63]), (1.0, 2.0**-63)),
        ([LARGE + 1, 7], torch.tensor([LARGE + 0j, 4 + 4j], dtype=torch.complex128), (5.0, 5 / 7)),
        ([LARGE + 1, 7], torch.tensor([1, 7]).to(torch.bfloat16), (float(LARGE - 1), 1.0)),
        ([LARGE + 1, 7], torch.tensor([torch.nan, 7]), (torch.inf, torch.inf)),
        ([LARGE + 1, 7], torch.tensor([torch.inf, 7.0]), (torch.inf, torch.inf)),
    ],
)
def test_large_integers_beside_floating_point(whole, integers, numbers, gap):
    one = torch.tensor(integers, dtype=whole)
    for first, second in ((one, numbers), (numbers, one)):
        found = measure(*raw(first), *raw(second))
        assert (found.max_abs, found.max_rel) == pytest.approx(gap, rel=1e-12, abs=0)


def test_what_is_equal_is_exactly_equal():
    found = measure(*raw(torch.tensor([LARGE + 2])), *raw(torch.tensor([LARGE + 2.0], dtype=torch.float64)))
    assert found == Gap(0.0, 0.0)
