"""Optimizers whose state does not fit the model, and healthy ones that look similar."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from safetensors.torch import save_file

import ckptmove
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.proof.file_checks import check_structure, fail_on_findings

WRONG = {"O204", "O206"}


def net(*widths):
    torch.manual_seed(0)
    return torch.nn.Sequential(*map(torch.nn.Linear, widths[:-1], widths[1:]))


def state_of(parameters, kind=torch.optim.AdamW, **options):
    """The state_dict of an optimizer after a step."""
    parameters = list(parameters)
    optimizer = kind(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(lambda: torch.ones(())) if kind is torch.optim.LBFGS else optimizer.step()
    return optimizer.state_dict()


def put(build, name, tree):
    build.save(build.root / name, tree)
    return build.root / name


def wrong(path):
    return {one.code for one in ckptmove.inspect(path).findings} & WRONG


def structure(path):
    """The check as `verify` gives it."""
    found = ckptmove.inspect(path)
    pairings = list(zip(found.inventory.optimizers, pair_all(found.inventory), strict=True))
    return fail_on_findings(check_structure(found.inventory, pairings), found.findings).status


def trees():
    """Optimizers that do not fit the model, each with its findings."""
    model = net(6, 5, 4).state_dict()
    extra = state_of(net(6, 5, 4).parameters())
    extra["param_groups"][0]["params"].append(4)
    twice = state_of([*net(6, 5, 4).parameters(), torch.nn.Parameter(torch.ones(5))])
    return {
        "wider": (model, state_of(net(6, 8, 4).parameters()), {"O204"}),
        "twice as wide": (model, state_of(net(6, 10, 4).parameters()), {"O204"}),
        "narrower": (net(6, 10, 4).state_dict(), state_of(net(6, 5, 4).parameters()), {"O204"}),
        "deeper": (model, state_of(net(6, 5, 5, 4).parameters()), {"O204", "O206"}),
        "deeper by a layer of one shape": (
            net(6, 6, 6).state_dict(),
            state_of(net(6, 6, 6, 6).parameters()),
            {"O206"},
        ),
        "one parameter too many": (model, extra, {"O206"}),
        "one too many with state": (model, twice, {"O206"}),
    }


@pytest.mark.unmeasured
@pytest.mark.parametrize("layout", ["plain", "hf-trainer", "safetensors", "accelerate", "shards", "lightning folder"])
@pytest.mark.parametrize("name", trees())
def test_one_of_another_model(build, layout, name):
    model, optimizer, codes = trees()[name]
    if layout in {"plain", "lightning folder"}:
        path = put(build, "run/last.ckpt", {"state_dict": model, "optimizer_states": [optimizer], "epoch": 1})
        path = path.parent if layout == "lightning folder" else path
    elif layout == "accelerate":
        path = build.accelerate()
        build.save(path / "pytorch_model.bin", model)
        build.save(path / "optimizer.bin", optimizer)
    else:
        path = build.hf_trainer(shards=2 if layout == "shards" else 1)
        build.save(path / "optimizer.pt", optimizer)
        if layout == "shards":
            first, second = sorted(path.glob("pytorch_model-*.bin"))
            names = list(model)
            build.save(first, {key: model[key] for key in names[:2]})
            build.save(second, {key: model[key] for key in names[2:]})
        elif layout == "safetensors":
            (path / "pytorch_model.bin").unlink()
            save_file(model, path / "model.safetensors", metadata={"format": "pt"})
        else:
            build.save(path / "pytorch_model.bin", model)
    assert wrong(path) == codes
    assert structure(path) == "failed"


@pytest.mark.parametrize("name", ["wider", "narrower"])
def test_torch_refuses_the_step(name):
    model, optimizer, _ = trees()[name]
    parameters = [torch.nn.Parameter(value) for value in model.values()]
    resumed = torch.optim.AdamW(parameters)
    resumed.load_state_dict(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="must match"):
        resumed.step()


def healthy():
    """Checkpoints with a model in other shapes, or in more or fewer tensors, than its optimizer has."""
    model = net(6, 5, 4)
    weights, adam = model.state_dict(), state_of(model.parameters())
    flat = torch.nn.Parameter(torch.cat([value.flatten() for value in weights.values()]))
    tied = {**weights, "2.weight": weights["0.weight"]}
    odd = state_of(model.parameters())
    odd["state"][0]["projector"] = torch.ones(2, 2)
    odd["state"][0]["exp_avg"] = torch.ones(2, 6)
    split = state_of(model.parameters())
    split["state"][0]["exp_avg"] = torch.ones(30)
    unlisted = state_of(model.parameters())
    unlisted["state"]["total"] = {"exp_avg": torch.ones(7, 7)}
    packed = {**weights, "0.weight": torch.ones(15, 1, dtype=torch.uint8)}
    lora = {"0.lora_A.weight": torch.ones(2, 6), "0.lora_B.weight": torch.ones(5, 2)}
    scalar = torch.nn.Parameter(torch.ones(()))
    return {
        "tied": (tied, adam),
        "of a part": (weights, state_of(model[1].parameters())),
        "of nothing stepped": (weights, torch.optim.SGD(model.parameters(), lr=0.1).state_dict()),
        "flat": (weights, state_of([flat])),
        "factored": (weights, state_of(model.parameters(), torch.optim.Adafactor)),
        "one vector": (weights, state_of(model.parameters(), torch.optim.LBFGS)),
        "with a foreign key": (weights, odd),
        "of two shapes": ({str(number): torch.ones(9, 9) for number in range(4)}, split),
        "state of its own": (weights, unlisted),
        "packed": (packed, adam),
        "adapter": (lora, state_of(model.parameters())),
        "of a scalar": (weights, state_of([scalar])),
        "of a model elsewhere": ({}, adam),
    }


@pytest.mark.unmeasured
@pytest.mark.parametrize("layout", ["plain", "hf-trainer"])
@pytest.mark.parametrize("name", healthy())
def test_one_that_may_be_right(build, layout, name):
    model, optimizer = healthy()[name]
    if layout == "plain":
        path = put(build, "last.pt", {"model": model, "optimizer": optimizer})
    else:
        path = build.hf_trainer()
        build.save(path / "pytorch_model.bin", model)
        build.save(path / "optimizer.pt", optimizer)
    assert wrong(path) == set()


def experts(count=4, layers=2):
    """The parameters of a mixture of experts, and its weights as transformers stores them."""
    parameters, weights = [], {}
    for layer in range(layers):
        parameters += [torch.nn.Parameter(torch.ones(count, 10, 6)), torch.nn.Parameter(torch.ones(count, 6, 5))]
        for expert in range(count):
            for name, shape in (("gate", (5, 6)), ("up", (5, 6)), ("down", (6, 5))):
                weights[f"layers.{layer}.experts.{expert}.{name}_proj.weight"] = torch.ones(shape)
    return parameters, weights


def test_weights_that_the_trainer_splits_and_joins_where_it_saves_them(build):
    parameters, weights = experts()
    path = build.hf_trainer()
    build.save(path / "optimizer.pt", state_of(parameters))
    build.save(path / "pytorch_model.bin", weights)
    assert wrong(path) == set()
    few = {key: value for key, value in weights.items() if "experts.0" in key}
    build.save(path / "pytorch_model.bin", few)
    assert wrong(path) == {"O204"}
    joined = {"qkv.weight": torch.ones(18, 6), "qkv.bias": torch.ones(18)}
    three = [torch.nn.Parameter(torch.ones(shape)) for shape in [(6, 6), (6,)] * 3]
    build.save(path / "pytorch_model.bin", joined)
    build.save(path / "optimizer.pt", state_of(three))
    assert wrong(path) == set()
    build.save(path / "optimizer.pt", state_of(three[:2]))
    assert wrong(path) == {"O204"}


def test_files_that_have_nothing_to_do_with_each_other(build):
    put(build, "a/model.pt", {"model": net(6, 5).state_dict()})
    path = put(build, "a/optimizer.pt", state_of(net(9, 8).parameters())).parent
    assert wrong(path) == set()


def test_the_parameters_of_a_loss_are_not_saved_by_sentence_transformers(build, monkeypatch):
    path = build.hf_trainer()
    build.save(path / "optimizer.pt", state_of(net(6, 8, 4).parameters()))
    assert wrong(path) == {"O204"}
    name = "sentence_transformers.training_args"
    module = types.ModuleType(name)
    module.Arguments = type("Arguments", (), {"__module__": name})
    monkeypatch.setitem(sys.modules, "sentence_transformers", types.ModuleType("sentence_transformers"))
    monkeypatch.setitem(sys.modules, name, module)
    build.save(path / "training_args.bin", module.Arguments())
    assert wrong(path) == set()


def test_ranks_that_hold_a_part_each(build):
    path = build.deepspeed()
    assert wrong(path) == set()


def test_a_model_in_the_folder_below(build):
    path = build.hf_trainer()
    (path / "1_Dense").mkdir()
    (path / "pytorch_model.bin").rename(path / "1_Dense" / "pytorch_model.bin")
    assert wrong(path) == set()
    build.save(path / "optimizer.pt", state_of(net(6, 8, 4).parameters()))
    assert wrong(path) == {"O204"}


def test_each_folder_is_for_itself(build):
    for number in (1, 2):
        build.hf_trainer(f"run/checkpoint-{number}")
    path = build.root / "run"
    assert wrong(path) == set()
    build.save(path / "checkpoint-2" / "optimizer.pt", state_of(net(6, 8, 4).parameters()))
    [finding] = [one for one in ckptmove.inspect(path).findings if one.code in WRONG]
    assert all(where.startswith("checkpoint-2/optimizer.pt.") for where in finding.where)


def test_a_folder_of_an_adapter(build):
    path = build.hf_trainer()
    (path / "pytorch_model.bin").unlink()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    save_file({"base_model.ia3_l": torch.ones(1, 6)}, path / "adapter_model.safetensors", metadata={"format": "pt"})
    [finding] = [one for one in ckptmove.inspect(path).findings if one.code in WRONG]
    assert (finding.code, finding.severity, structure(path)) == ("O206", "warning", "skipped")
