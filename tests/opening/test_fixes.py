"""A fix names the file of its finding, also if there are other files."""

from __future__ import annotations

import shutil

import pytest
import torch

import ckptmove
from ckptmove.findings.context import file_of


@pytest.fixture
def folder(build):
    """A directory in which each file after the first has something of its own to mend."""
    folder = build.accelerate()
    build.save(folder / "a_first.bin", {"note": 1})
    build.save(folder / "random.pkl", {"states": {"torch_rng": torch.get_rng_state().float()}}, "cuda:0")
    build.save(folder / "args.bin", {"args": {"device_ids": [2]}})
    build.save(folder / "scheduler.bin", {"last_epoch": 1, "_last_lr": [0.5], "base_lrs": [0.5], "_step_count": 2})
    return folder


def fixes(path):
    return {one.code: one.fix for one in ckptmove.inspect(path).findings}


@pytest.mark.parametrize("form", ["directory", "zip"])
@pytest.mark.parametrize(("code", "name"), [("D104", "args.bin"), ("R301", "random.pkl"), ("R304", "scheduler.bin")])
def test_a_fix_names_the_file_that_is_meant(folder, code, name, form, tmp_path):
    path = folder if form == "directory" else shutil.make_archive(str(tmp_path / "packed"), "zip", folder)
    assert name in fixes(path)[code]


class Wrapper(torch.Tensor):
    """A subclass without a storage, whose dtype is in the file twice."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[arg.inner if isinstance(arg, Wrapper) else arg for arg in args], **(kwargs or {}))


def test_a_dtype_is_cast_by_hand_in_the_file_that_has_it(folder):
    torch.save({"w": Wrapper(torch.ones(2, dtype=torch.float64))}, folder / "wide.bin")
    [fix] = [one.fix for one in ckptmove.inspect(folder, target="mps").findings if one.code == "T401"]
    assert "cast wide.bin.w from float64" in fix


def test_state_that_is_not_the_models_is_left_out(build):
    folder = build.accelerate()
    path = folder / "optimizer.bin"
    state = torch.load(path, map_location="cpu")
    del state["param_groups"][0]["betas"]
    build.save(path, state, "cuda:0")
    fix = fixes(folder)["O207"]
    assert "optimizer.bin" in fix
    assert "load(" not in fix


def test_a_file_of_both_is_restored_for_its_model(build):
    model, optimizer = build.trained()
    state = optimizer.state_dict()
    del state["param_groups"][0]["betas"]
    build.save(build.root / "runs" / "a.bin", {"note": 1})
    build.save(build.root / "runs" / "b.pth", {"model": model.state_dict(), "optimizer": state, "epoch": 2})
    assert "the model of b.pth" in fixes(build.root / "runs")["O207"]


#: What the states of the two first parameters lack, a counter of the file, and the source of the step.
STEPS = {
    "of another entry": ((1,), {}, "optimizer.state.0"),
    "of the file": ((0, 1, 2, 3), {"global_step": 120}, "torch.tensor(120.0)"),
    "of nothing": ((0, 1, 2, 3), {}, ""),
}


@pytest.mark.parametrize(("lacking", "more", "source"), STEPS.values(), ids=STEPS)
def test_a_step_that_alone_is_missing_is_given_from_where_it_is(build, lacking, more, source):
    model, optimizer = build.trained()
    state = optimizer.state_dict()
    for key in lacking:
        del state["state"][key]["step"]
    build.save(build.root / "one.pth", {"model": model.state_dict(), "optimizer": state, **more})
    fix = fixes(build.root / "one.pth")["O207"]
    assert (source in fix, "without a step" in fix) == (True, bool(source))
    assert "restore only the model" in fix
    del state["state"][1]["exp_avg"]
    build.save(build.root / "two.pth", {"model": model.state_dict(), "optimizer": state, **more})
    assert "without a step" not in fixes(build.root / "two.pth")["O207"]


def test_of_two_names_the_longer_one_is_the_file(build):
    for name in ("model", "model.bin"):
        build.save(build.root / "pair" / name, {"w": torch.ones(2)})
    inventory = ckptmove.inspect(build.root / "pair").inventory
    assert [file_of(inventory, f"{name}.w").path for name in ("model", "model.bin")] == ["model", "model.bin"]
    assert file_of(inventory, "other.w") is None
