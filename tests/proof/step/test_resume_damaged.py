"""A step from a file with missing bytes or keys: the report names what is missing."""

from __future__ import annotations

import pickle
import zipfile

import pytest
import torch

import ckptmove


@pytest.fixture
def shorten(tmp_path):
    """Truncates the record of a tensor in an archive."""

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
    assert found["restore"]["evidence"]["unreadable"] == 1
    assert found["restore"]["detail"].endswith(": optimizer.state.0.exp_avg")
    assert found["step"]["detail"].startswith("the input of the step cannot be read: model.0.weight: ")
    assert "'optimizer.state.0.exp_avg'" in found["step"]["detail"]


def test_a_learning_rate_that_is_cut_off_does_not_end_the_process(make, answers, shorten):
    found = answers(shorten(make("AdamW", lr=torch.tensor(0.01)), "optimizer.param_groups.0.lr", 0), "cpu")
    assert statuses(found) == ["failed", "failed", "skipped", "skipped"]
    assert "'optimizer.param_groups.0.lr'" in found["step"]["detail"]


@pytest.mark.parametrize("key", ["exp_avg_sq", "step"])
def test_a_key_that_the_state_of_a_parameter_lacks(make, answers, key):
    tree = make.tree("AdamW")
    del tree["optimizer"]["state"][2][key]
    detail = answers(make.save(tree), "cuda:0")["step"]["detail"]
    said = f"model.1.weight: KeyError: '{key}': the state of parameter 2 does not have it, and AdamW reads it"
    assert detail == f"the step fails on cuda:0 (simulated): {said}"


def test_a_key_that_a_group_lacks(make, answers):
    tree = make.tree("AdamW")
    del tree["optimizer"]["param_groups"][0]["betas"]
    detail = answers(make.save(tree), "cpu", optimizer="AdamW")["step"]["detail"]
    assert "model.0.weight: KeyError: 'betas': optimizer.param_groups.0 " in detail


def test_a_key_that_an_optimizer_of_ones_own_looks_for_elsewhere(make, answers, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_key.py").write_text(OWN)
    for key, said in (
        ("exp_avg", "model.0.weight: KeyError: 'exp_avg'"),
        (
            "other",
            "model.0.weight: KeyError: 'other': the state of parameter 0 does not have it, and own_key:Own reads it",
        ),
        ("", "model.0.weight: KeyError"),
    ):
        monkeypatch.setenv("OWN_KEY", key)
        assert answers(make("AdamW"), "cpu", optimizer="own_key:Own")["step"]["detail"].endswith(said)


OWN = """
import os
import torch

class Own(torch.optim.AdamW):
    def step(self, closure=None):
        key = os.environ["OWN_KEY"]
        if any(state["step"] > 2 for state in self.state.values()):
            raise KeyError(key) if key else KeyError
        super().step(closure)
"""


def test_tensors_that_are_encoded_as_text_are_not_stepped(make, answers, tmp_path):
    path = tmp_path / "run.pkl"
    path.write_bytes(pickle.dumps(make.tree(), protocol=2))
    step = answers(str(path), "cuda:0")["step"]
    assert (step["status"], "protocol 4" in step["detail"]) == ("skipped", True)
