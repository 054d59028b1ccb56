"""A file of a later save among the files of an earlier one, known by its step counts alone."""

from __future__ import annotations

import io

import fsspec
import pytest
import torch
from distributed_checkpoints import Distributed

import ckptmove

RANKS = 4
#: Values of a moment: with them, a file at a URL is larger than what the requests that open it read.
LARGE = 1 << 15


def saved(folder, counts, *, width=4, shared=True, dtype=torch.float32, optimizers=("optim",)):
    """Save the state of parameters, each with its step count in the file of one rank.

    Args:
        folder: the folder.
        counts: for each parameter, the rank that saves its count, and the count.
        width: elements of a moment on each rank.
        shared: whether each rank has a part of each moment, or one rank the whole.
        dtype: dtype of the counts.
        optimizers: keys of the optimizers, which have the parameters in turn.
    """
    tensors = {}
    for index, (rank, count) in enumerate(counts):
        name = f"{optimizers[index % len(optimizers)]}.state.p{index}"
        size = RANKS * width
        boxes = [(one, (one * width,), (width,)) for one in range(RANKS)] if shared else [(rank, (0,), (size,))]
        tensors[f"{name}.step"] = (torch.tensor(count, dtype=dtype), [(rank, (), ())])
        tensors[f"{name}.exp_avg"] = (torch.ones(size), boxes)
        tensors[f"{name}.exp_avg_sq"] = (torch.ones(size), boxes)
    groups = io.BytesIO()
    torch.save([{"lr": 0.1, "params": [f"p{index}" for index in range(len(counts))]}], groups)
    objects = {f"{one}.param_groups": (0, groups.getvalue()) for one in optimizers}
    Distributed.save_ranks(folder, tensors, objects)

    def nest(metadata):
        metadata.planner_data = {name: tuple(name.split(".")) for name in (*tensors, *objects)}

    return Distributed.change(folder, nest)


def mixed(path):
    return [list(one.where) for one in ckptmove.inspect(path).findings if one.code == "F807"]


HEALTHY = [(1 + index % 3, 3.0) for index in range(12)]
LATER = [(rank, 5.0 if rank == 2 else count) for rank, count in HEALTHY]


@pytest.mark.parametrize(
    ("counts", "options", "expected"),
    [
        (HEALTHY, {}, []),
        (LATER, {}, [["__2_0.distcp"]]),
        (LATER, {"optimizers": ("optim", "other")}, [["__2_0.distcp"]]),
        ([(rank, 8.0 - count) for rank, count in LATER], {}, [["__2_0.distcp"]]),  # the rest is of the later save
        ([(1 + index % 2, 3.0 + index % 2) for index in range(6)], {}, [["__2_0.distcp"]]),
        ([(1, 3.0)] * 6, {}, []),
        ([(1, 3.0), (2, 5.0)], {}, []),  # one parameter was frozen for a time
        ([(1, 3.0), (1, 3.0), (2, 5.0)], {}, []),
        ([(1 + index % 3, 3.0 if index < 6 else 5.0) for index in range(12)], {}, []),  # so was the first half
        ([*LATER[:-2], (2, 3.0), *LATER[-2:]], {}, []),
        ([*[(2, 5.0)] * 4, (2, 3.0), *[(2, 5.0)] * 5, *[(1, 3.0)] * 9], {}, []),  # not among the first that are read
        (LATER, {"shared": False}, []),  # stages of a pipeline
        (LATER, {"dtype": torch.bfloat16}, []),
    ],
)
def test_counts_that_differ_along_the_files(tmp_path, counts, options, expected):
    assert mixed(saved(tmp_path / "run", counts, **options)) == expected


def test_verify_fails_and_convert_says_so(tmp_path):
    folder = saved(tmp_path / "run", LATER)
    found = ckptmove.verify(folder, to="cpu")
    assert [check.name for check in found.checks if check.status == "failed"] == ["file"]
    assert any("F807" in one for one in ckptmove.convert(folder, output=tmp_path / "whole.pth").warnings)


@pytest.mark.parametrize(("width", "requests"), [(4, 1), (LARGE, 2)])
def test_at_a_url_each_file_takes_two_requests_at_most(tmp_path, monkeypatch, width, requests):
    memory = fsspec.filesystem("memory")
    memory.put(str(saved(tmp_path / "run", LATER, width=width)), "/mixed", recursive=True)
    try:
        there = ckptmove.inspect("memory://mixed")
        monkeypatch.setattr("ckptmove.opening.interrupted_save._of_another_save", lambda *_: [])
        before = ckptmove.inspect("memory://mixed")
    finally:
        memory.rm("/mixed", recursive=True)
    assert there.traffic.requests <= before.traffic.requests + requests * (RANKS - 1)
    assert [list(one.where) for one in there.findings if one.code == "F807"] == [["__2_0.distcp"]]
