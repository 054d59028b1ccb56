"""The lines that S701 and S703 print, run with the torch that is installed."""

from __future__ import annotations

import argparse
import collections
import pathlib

import numpy as np
import pytest
import torch
from weights_only_lists import numbers

import ckptmove

VALUES = {
    "a set": {1, 2},
    "a complex number": 1j,
    "a Namespace": argparse.Namespace(lr=1),
    "a Namespace and a set": [argparse.Namespace(lr=1), {1}],
    "a path": pathlib.Path("runs"),
    "a NumPy scalar": np.float64(1.5),
    "a module": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)),
    "an empty defaultdict": collections.defaultdict(list),
    "a defaultdict": collections.defaultdict(list, a=[1]),
    "an empty deque": collections.deque(),
    "a deque": collections.deque([1]),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_the_line_loads_the_file(value, tmp_path):
    path = str(tmp_path / "c.pt")
    torch.save({"weight": torch.ones(2), "value": value}, path)
    (finding,) = [one for one in ckptmove.inspect(path).findings if one.code in {"S701", "S703"}]
    oldest = finding.fix.partition("# torch ")[2].removesuffix(" or later")
    if oldest and numbers(oldest) > numbers(torch.__version__):
        pytest.skip(f"the line is for torch {oldest}")
    before = torch.serialization.get_safe_globals()
    try:
        exec(finding.fix, {"torch": torch})
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="this torch knows them for good alone")
@pytest.mark.parametrize("value", [collections.deque([1]), collections.deque()], ids=["filled", "empty"])
def test_no_line_would_have_it_put_items_into_a_deque(value, tmp_path):
    torch.save(value, tmp_path / "c.pt")
    with torch.serialization.safe_globals([collections.deque]):
        if value:
            with pytest.raises(Exception, match="Can only append to lists"):
                torch.load(tmp_path / "c.pt", weights_only=True)
        else:
            assert torch.load(tmp_path / "c.pt", weights_only=True) == value
