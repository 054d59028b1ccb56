"""A step from a file that has lost bytes: what is lost is named, and torch is not blamed for it."""

from __future__ import annotations

import zipfile

import pytest
import torch

import ckptmove


@pytest.fixture
def shorten(tmp_path):
    """Cuts a tensor's record in an archive off behind some bytes, as no torch writes it."""

    def shorten(path, name, left):
        (tensor,) = [one for one in ckptmove.inspect(path).inventory.tensors if one.name == name]
        short = tmp_path / "short.pt"
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(short, "w") as target:
            for item in source.infolist():
                data = source.read(item)
                target.writestr(
                    item.filename, data[:left] if item.filename.endswith(f"/data/{tensor.storage}") else data
                )
        return str(short)

    return shorten


def statuses(found):
    return [found[name]["status"] for name in ("restore", "step", "parity", "fresh")]


@pytest.mark.parametrize("left", [0, 60], ids=["nothing", "half"])
def test_a_moment_that_is_cut_off(make, answers, shorten, left):
    found = answers(shorten(make("AdamW"), "optimizer.state.0.exp_avg", left), "cpu")
    assert statuses(found) == ["failed", "failed", "skipped", "skipped"]
    assert found["restore"]["detail"] == "bytes not stored plainly and whole: optimizer.state.0.exp_avg"
    assert found["step"]["detail"].startswith("there is nothing to step from: model.0.weight: ")
    assert found["step"]["detail"].endswith("'optimizer.state.0.exp_avg' is not stored plainly and whole")


def test_a_learning_rate_that_is_cut_off_does_not_end_the_process(make, answers, shorten):
    found = answers(shorten(make("AdamW", lr=torch.tensor(0.01)), "optimizer.param_groups.0.lr", 0), "cpu")
    assert statuses(found) == ["failed", "failed", "skipped", "skipped"]
    assert found["step"]["detail"].startswith("there is nothing to step from: ")
    assert "'optimizer.param_groups.0.lr' is not stored plainly and whole" in found["step"]["detail"]
