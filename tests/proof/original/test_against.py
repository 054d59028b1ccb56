from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch

from ckptmove import convert


def change_weight(tree):
    tree["model"]["0.weight"][0, 0] += 1


def change_shape(tree):
    tree["model"]["0.weight"] = tree["model"]["0.weight"].reshape(6, 5).clone()


def remove(tree):
    del tree["model"]["0.weight"]


def add(tree):
    tree["model"]["extra"] = torch.ones(1)


def change_option(tree):
    tree["optimizer"]["param_groups"][0]["lr"] = 5.0


def remove_option(tree):
    del tree["optimizer"]["param_groups"][0]["lr"]


def change_epoch(tree):
    tree["epoch"] = 4


def change_text(tree):
    tree["arch"] = "resnet"


def second_optimizer(tree):
    tree["again"] = tree["optimizer"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_weight, "model.0.weight: other bits"),
        (change_shape, "model.0.weight: shape [5, 6] in place of [6, 5]"),
        (remove, "model.0.weight is not in the original"),
        (add, "model.extra is missing"),
        (change_option, "optimizer.param_groups.0.lr is 0.001 in place of 5.0"),
        (remove_option, "optimizer.param_groups.0.lr is not in the original"),
        (second_optimizer, "again.state.0.step is missing"),
        (change_epoch, "epoch is 3 in place of 4"),
        (change_text, "arch is missing"),
    ],
)
def test_what_differs_from_the_original_is_named(make, answers, change, said):
    path = make("AdamW")
    tree = make.tree("AdamW")
    change(tree)
    found = answers(path, "cpu", against=make.save(tree, name="original.pt"))
    assert found["restore"]["status"] == "failed"
    assert said in found["restore"]["detail"]


def test_devices_and_flags_may_differ_from_the_original(make, answers):
    tree = make.tree("AdamW")
    path = make.save(tree)
    for group in tree["optimizer"]["param_groups"]:
        group["fused"] = True
    original = make.save(tree, name="original.pt", device="mps")
    found = answers(path, "cuda:0", against=original)
    assert found["restore"]["status"] == "passed"
    assert found["restore"]["detail"].endswith(f"; all equal {original}, ignoring devices")
    assert found["parity"]["status"] == "passed"


def test_a_cast_is_held_to_the_cast_of_the_original(make, answers):
    wide = make.tree("AdamW", dtype=torch.float64)
    original = make.save(wide, name="original.pt")

    def narrow(value):
        if isinstance(value, dict):
            return {key: narrow(item) for key, item in value.items()}
        return value.float() if isinstance(value, torch.Tensor) else value

    tree = {**wide, "model": narrow(wide["model"])}
    tree["optimizer"] = {**wide["optimizer"], "state": narrow(wide["optimizer"]["state"])}
    moved = str(convert(original, to="mps", cast=True).output)
    found = answers(moved, "mps", against=original)
    assert found["restore"]["detail"].endswith(" 12 tensors cast from float64 to float32")
    assert found["parity"]["detail"].endswith(f"from {original}, cast like this file")
    assert [found[name]["status"] for name in ("restore", "step", "parity", "fresh")] == ["passed"] * 4, found
    tree["model"]["0.weight"][0, 0] += 1e-3
    found = answers(make.save(tree, device="mps"), "mps", against=original)
    assert "model.0.weight: other bits" in found["restore"]["detail"]


def test_a_failed_restore_stays_failed_beside_an_original(make, answers, monkeypatch):
    path = make("AdamW")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: {})
    found = answers(path, "cpu", against=path)
    assert found["restore"]["status"] == "failed"
    assert found["restore"]["evidence"]["changed"] == 0


def test_a_deflated_original_is_inflated(make, answers, tmp_path):
    path = make("SGD", model=torch.nn.Linear(2, 2))
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for item in source.infolist():
            kind = zipfile.ZIP_DEFLATED if "/data/" in item.filename else zipfile.ZIP_STORED
            target.writestr(item.filename, source.read(item), kind)
    found = answers(path, "cuda:0", against=str(packed))
    assert found["restore"]["evidence"]["changed"] == 0
    assert [found[name]["status"] for name in ("restore", "parity")] == ["passed", "passed"]
    found = answers(str(packed), "cuda:0")
    assert found["restore"]["status"] == "failed"
    assert "deflated" in found["step"]["detail"]


def test_what_is_in_no_tree_is_held_against_the_original(tmp_path, answers):
    for name, letter in (("a", b"x"), ("b", b"y")):
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps({"w": 1.0, "long": letter * 500}, protocol=2))
    one, other = (str(tmp_path / f"{name}.pkl") for name in "ab")
    assert answers(one, "cpu", against=other)["restore"]["evidence"]["changed"] == 1
    assert answers(one, "cpu", against=one)["restore"]["evidence"]["changed"] == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (torch.empty(2, device="meta"), torch.empty(2, device="meta"), None),
        (torch.empty(2, device="meta"), torch.ones(2), "w is meta in place of tensor"),
        (torch.eye(2), torch.eye(2).to_sparse(), "w is tensor in place of sparse_coo"),
    ],
    ids=["both", "lost", "sparse"],
)
def test_a_tensor_of_another_kind_is_named(make, answers, ours, theirs, said):
    original = make.save({"w": theirs, "v": torch.ones(1)}, name="original.pt", device="cpu")
    path = make.save({"w": ours, "v": torch.ones(1)}, device="cpu")
    restore = answers(path, "cpu", against=original)["restore"]
    assert (restore["status"] == "passed") if said is None else said in restore["detail"]


# --- names that have changed -----------------------------------------------------------------------------------------


def exchange_names(tree):
    model = tree["model"]
    model["0.weight"], model["2.weight"] = model["2.weight"], model["0.weight"]


def rename_one(tree):
    tree["model"]["0.other"] = tree["model"].pop("0.weight")


def change_rate(tree):
    tree["optimizer"]["param_groups"][0]["lr"] = 5.0


def lose_bias(tree):
    del tree["model"]["0.bias"]


def lose_optimizer(tree):
    del tree["optimizer"]


def join_weights(tree):
    """The first two layers as one, with their moments; the numbers of the parameters change."""
    model, optimizer = tree["model"], tree["optimizer"]
    state = optimizer["state"]
    for number, name in enumerate(("weight", "bias")):
        model[f"both.{name}"] = torch.cat([model.pop(f"0.{name}"), model.pop(f"1.{name}")])
        for key in ("exp_avg", "exp_avg_sq"):
            state[number][key] = torch.cat([state[number][key], state[number + 2][key]])
    optimizer["state"] = {0: state[0], 1: state[1], 2: state[4], 3: state[5]}
    optimizer["param_groups"][0]["params"] = [0, 1, 2, 3]


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        (lambda _: None, "proven", ""),
        (change_weight, "failed", "model.0.weight: other bits"),
        (exchange_names, "failed", "model.0.weight: other bits; model.2.weight: other bits"),
        (change_rate, "failed", "optimizer.param_groups.0.lr is 5.0 in place of 0.001"),
        (change_epoch, "failed", "epoch is 4 in place of 3"),
        (lose_bias, "failed", "0.bias is missing"),
        (rename_one, "unseen", "paired by content alone: model.0.other is model."),
        (lose_optimizer, "unseen", "left out: optimizer"),
        (join_weights, "unseen", "only in the original: model."),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_prefix_hides_no_change(make, answers, prefix, change, verdict, said):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    tree = make.tree("AdamW", model=model)
    names = OrderedDict((f"{prefix}{name}", value.clone()) for name, value in tree["model"].items())
    names._metadata = tree["model"]._metadata
    original = {**tree, "model": names}
    against = make.save(original, name="original.pt")
    change(tree)
    restore = answers(make.save(tree), "cpu", against=against)["restore"]
    figures = dict(restore["evidence"])
    assert said in restore["detail"]
    found = "failed" if restore["status"] == "failed" else "unseen" if figures["unseen"] else "proven"
    assert found == verdict, restore
    assert ("not_shown" in figures) == bool(figures["unseen"])


def test_names_of_parameters_follow_those_of_the_model(make, answers):
    model = torch.nn.Linear(4, 4)
    tree = make.tree("AdamW", model=model)
    names = {0: "weight", 1: "bias"}
    optimizer = tree["optimizer"]
    state = {names[number]: entry for number, entry in optimizer["state"].items()}
    groups = [{**optimizer["param_groups"][0], "params": [*names.values()]}]
    tree["optimizer"] = {"state": state, "param_groups": groups}
    path = make.save(tree)
    tree["model"] = {f"module.{name}": value for name, value in tree["model"].items()}
    tree["optimizer"] = {
        "state": {f"module.{name}": entry for name, entry in state.items()},
        "param_groups": [{**groups[0], "params": [f"module.{name}" for name in names.values()]}],
    }
    restore = answers(path, "cpu", against=make.save(tree, name="original.pt"))["restore"]
    assert restore["status"] == "passed"
    assert restore["evidence"]["changed"] == 0
