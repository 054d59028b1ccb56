"""Checkpoints of Megatron-Core: state by name in a distributed checkpoint, and options in ``common.pt``."""

from __future__ import annotations

import copy

import pytest
import torch

import ckptmove

#: Options of a group as torch writes them, and of one of apex or Transformer Engine.
NATIVE = dict(torch.optim.AdamW([torch.ones(1)], lr=0.01).defaults)
FUSED = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}


@pytest.fixture
def save(distributed, tmp_path):
    """Save a trained model as Megatron-Core does; ``prefix`` is that of one optimizer of several."""

    def write(optimizer, *, copies=False, prefix="", extra=None, state=True, folder="run"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        tree = {name: (one.bfloat16() if copies else one).detach() for name, one in model.named_parameters()}
        for name, one in model.named_parameters() if state else ():
            moment = torch.randn_like(one)
            own = {"exp_avg": moment, "exp_avg_sq": moment.square() * 9}
            own |= {"fp32_param": one.detach()} if copies else {}
            tree |= {f"{prefix}optimizer.state.{key}.{name}": value for key, value in own.items()}
        path = distributed.save(
            tmp_path / folder, {**tree, "rng_state/shard_0_1": {"r": torch.ones(1)}, **(extra or {})}
        )
        torch.save({"optimizer": optimizer, "iteration": 7}, path / "common.pt")
        return path

    return write


def checks(path, **options):
    return {check.name: check for check in ckptmove.verify(path, **options).checks}


def test_native_options(save):
    path = save({"param_groups": [{**NATIVE, "step": 3, "wd_mult": 1.0}]})
    found = ckptmove.inspect(path)
    (record,) = found.inventory.optimizers
    assert (record.where, record.candidates[0], record.obstacle) == ("optimizer", "AdamW", "")
    assert [(entry.key, dict(entry.scalars)) for entry in record.state] == [
        (f"{layer}.{kind}", {"step": 3}) for layer in (0, 1) for kind in ("weight", "bias")
    ]
    assert {one.role for one in found.inventory.tensors if one.name.startswith("optimizer.")} == {"optimizer"}
    assert "rng" in found.inventory.contents
    assert found.inventory.step == 7
    results = checks(path)
    assert [results[name].status for name in ("restore", "step", "parity", "fresh")] == ["passed"] * 4
    assert dict(results["step"].evidence)["parameters"] == 4


def test_the_step_count_is_part_of_the_state(save):
    path = save({"param_groups": [{**NATIVE, "step": 3}]})
    other = save({"param_groups": [{**NATIVE, "step": 4}]}, folder="other")
    assert not ckptmove.verify(other, against=path).ok


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_are_stepped(save, depth):
    optimizer = {"state": {"common_step": torch.tensor(3.0)}, "param_groups": [{**FUSED, "params": [0]}]}
    path = save(optimizer if depth == 1 else {"optimizer": optimizer, "grad_scaler": {}}, copies=True)
    found = ckptmove.inspect(path)
    (record,) = found.inventory.optimizers
    assert record.candidates == ("AdamW", "Adam")
    assert all(entry.tensor("step") is not None for entry in record.state)
    result = checks(path)["step"]
    assert result.status == "passed"
    assert dict(result.evidence)["proven"] is True


def test_a_chain_of_optimizers(save):
    chained = {0: {"param_groups": [{**FUSED, "step": 3}]}, 1: {"param_groups": [{**FUSED, "step": 3}]}}
    path = save(chained, prefix="chained_0.")
    (record,) = ckptmove.inspect(path).inventory.optimizers
    assert (record.where, record.algorithm) == ("chained_0.optimizer", "AdamW")


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ({"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "step": 1}]}, ("eps", "weight_decay")),
        ({"param_groups": [{**FUSED, "step": 1}, {**FUSED, "step": 1, "weight_decay": 0.0}]}, ("weight_decay",)),
        ({"param_groups": [{**FUSED, "step": 1}, {**FUSED, "step": 2}]}, ("step",)),
        ({"param_groups": [FUSED]}, ("step",)),
        ({"param_groups": []}, ("param_groups",)),
        ({"other": {"param_groups": [FUSED]}}, ("param_groups",)),
        ({"optimizer": {"optimizer": {"optimizer": 1}}}, ("param_groups",)),
        ([FUSED], ("param_groups",)),
    ],
)
def test_why_it_is_not_stepped(save, optimizer, words):
    path = save(copy.deepcopy(optimizer))
    (record,) = ckptmove.inspect(path).inventory.optimizers
    assert record.algorithm is None
    assert all(word in record.obstacle for word in ("common.pt", *words))
    assert not [one for one in ckptmove.inspect(path).findings if one.severity != "info"]


@pytest.mark.parametrize("kind", ["a tensor", "an object"])
def test_flat_buckets_have_no_names(save, kind):
    name = "optimizer.distributed.dp_group_idx_0.param_state"
    value = torch.ones(4) if kind == "a tensor" else {"x": 1}
    path = save({"param_groups": [{**FUSED, "step": 1}]}, state=False, extra={name: value})
    (record,) = ckptmove.inspect(path).inventory.optimizers
    assert name in record.obstacle


COPIED = {"optimizer": {"state": {"common_step": torch.tensor(3.0)}, "param_groups": [{**FUSED, "params": [0]}]}}


@pytest.mark.parametrize("folder", ["run", "run/iter_0000007"])
def test_one_file_is_stepped(save, tmp_path, folder, answers):
    path = save(COPIED, copies=True, folder=folder)
    output = tmp_path / "one.pth"
    ckptmove.convert(tmp_path / "run", output=output)
    found = ckptmove.inspect(output).inventory
    assert found.layout == "megatron"
    assert [one.algorithm for one in found.optimizers] == ["AdamW"]
    results = answers(output, against=str(tmp_path / "run"))
    assert [results[name]["status"] for name in ("restore", "step", "parity", "fresh")] == ["passed"] * 4
    assert (results["step"]["evidence"]["parameters"], results["step"]["evidence"]["proven"]) == (4, True)
    assert torch.load(path / "common.pt")["iteration"] == 7


def test_one_file_keeps_its_reason(save, tmp_path):
    path = save({"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "step": 1}]})
    ckptmove.convert(path, output=tmp_path / "one.pth")
    found = ckptmove.inspect(tmp_path / "one.pth").inventory
    assert (found.step, "eps" in found.optimizers[0].obstacle) == (7, True)


def test_a_file_with_other_options_has_no_optimizer_of_megatron(tmp_path):
    torch.save({"0.weight": torch.ones(2), "common": {"param_groups": 1}, "x/common": 2, 3: 4}, tmp_path / "one.pth")
    found = ckptmove.inspect(tmp_path / "one.pth").inventory
    assert (found.layout, found.optimizers) == ("plain", ())


def test_the_reason_is_reported(save):
    name = "optimizer.distributed.dp_group_idx_0.param_state"
    path = save({"param_groups": [{**FUSED, "step": 1}]}, state=False, extra={name: torch.ones(4)})
    result = checks(path)["step"]
    assert (result.status, name in result.detail) == ("skipped", True)


def test_a_checkpoint_without_an_optimizer(save):
    path = save({"param_groups": [FUSED]}, state=False)
    assert ckptmove.inspect(path).inventory.optimizers == ()


def test_below_a_folder(save):
    path = save({"param_groups": [{**NATIVE, "step": 3}]}, folder="run/iter_0000007")
    (record,) = ckptmove.inspect(path.parent).inventory.optimizers
    assert (record.where, record.algorithm) == ("iter_0000007.optimizer", "AdamW")


def test_one_file_is_the_same(save, tmp_path):
    """The contents of ``common.pt`` are below the key ``common`` in one file."""
    path = save({"param_groups": [{**NATIVE, "step": 3}]})
    ckptmove.convert(path, output=tmp_path / "one.pth")
    assert ckptmove.diff(path, tmp_path / "one.pth").same
    assert ckptmove.diff(tmp_path / "one.pth", path).same
