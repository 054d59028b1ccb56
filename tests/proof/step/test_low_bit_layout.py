"""The state of bitsandbytes' 8-bit optimizers: bytes with a table and scales, in a dict of their own."""

from __future__ import annotations

import pytest
import torch

import ckptmove


def tree(step=3):
    """State of ``AdamW8bit`` of bitsandbytes 0.50 for a parameter of 4096 values, and for a small one."""
    torch.manual_seed(0)
    table = torch.linspace(-1, 1, 256)
    large = {
        "state1": torch.randint(256, (64, 64), dtype=torch.uint8), "state2": torch.randint(256, (64, 64)).byte(),
        "qmap1": table, "qmap2": table.abs(), "absmax1": torch.rand(16), "absmax2": torch.rand(16),
    }  # fmt: skip
    small = {"state1": torch.rand(6), "state2": torch.rand(6)}
    group = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "alpha": 0.0, "t_alpha": None,
        "t_beta3": None, "params": [0, 1],
    }  # fmt: skip
    return {
        "model": {"big": torch.randn(64, 64), "small": torch.randn(6)},
        "optimizer": {
            "state": {
                0: {"step": step, "__bnb_optimizer_quant_state__": large},
                1: {"step": step, "__bnb_optimizer_quant_state__": small},
            },
            "param_groups": [group],
        },
    }


@pytest.fixture
def path(tmp_path):
    torch.save(tree(), tmp_path / "c.pt")
    return str(tmp_path / "c.pt")


def test_nothing_is_said_against_it(path):
    inspected = ckptmove.inspect(path)
    assert [finding for finding in inspected.findings if finding.severity.value != "info"] == []
    result = ckptmove.verify(path, to="cpu")
    assert (result.passed, result.proven) == (True, False)
    assert {check.name: check.status for check in result.checks}["restore"] == "passed"
    assert ckptmove.diff(path, path).same


def test_there_and_back(path, tmp_path):
    there, back = str(tmp_path / "there.pt"), str(tmp_path / "back.pt")
    ckptmove.convert(path, to="cuda:0", output=there)
    assert {check.name: check.status for check in ckptmove.verify(there).checks}["placement"] == "passed"
    ckptmove.convert(there, to="cpu", output=back)
    assert ckptmove.diff(path, back).same


@pytest.mark.unmeasured
def test_its_own_class_steps_it(path):
    pytest.importorskip("bitsandbytes")
    result = ckptmove.verify(path, to="cpu", optimizer="bitsandbytes.optim:AdamW8bit")
    assert (result.passed, result.proven) == (True, True), result


def test_the_layout_is_that_of_the_package():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    expected = tree()["optimizer"]
    model = torch.nn.ParameterDict(tree()["model"])
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    found = optimizer.state_dict()
    assert found["param_groups"][0].keys() == expected["param_groups"][0].keys()
    for key, state in expected["state"].items():
        assert found["state"][key].keys() == state.keys()
        own, ours = (one["__bnb_optimizer_quant_state__"] for one in (found["state"][key], state))
        assert {name: (one.dtype, one.shape) for name, one in own.items()} == {
            name: (one.dtype, one.shape) for name, one in ours.items()
        }
