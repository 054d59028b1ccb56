"""Optimizers with keys in two forms: lost entries and other objects are reported."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace

import pytest
import torch

import ckptmove
from ckptmove.errors import LimitExceeded
from ckptmove.limits import Limits

GROUP = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0}


def training(*, named):
    keys = ["a.weight", "b.weight"] if named else [0, 1]
    moments = [torch.full((size,), float(size)) for size in (2, 3)]
    state = {
        key: {"step": 3, "exp_avg": moment, "exp_avg_sq": moment * moment}
        for key, moment in zip(keys, moments, strict=True)
    }
    model = {"a.weight": torch.ones(2), "b.weight": torch.ones(3)}
    groups = [{**GROUP, "params": [key]} for key in keys]
    return {"model": model, "optim": {"state": state, "param_groups": groups}, "config": {"a": {0: 1}}}


def less_decay(tree):
    del tree["optim"]["param_groups"][1]["weight_decay"]


def more_options(tree):
    tree["optim"]["param_groups"][0]["initial_lr"] = 0.1


def no_steps(tree):
    for entry in tree["optim"]["state"].values():
        del entry["step"]


def an_empty_group(tree):
    tree["optim"]["param_groups"].append({**GROUP, "params": []})


def one_group(tree):
    first, second = tree["optim"]["param_groups"]
    tree["optim"]["param_groups"] = [{**first, "params": first["params"] + second["params"]}]


def other_groups(tree):
    first, second = tree["optim"]["param_groups"]
    first["params"], second["params"] = first["params"] + second["params"], []


def keys_of_text(tree):
    tree["config"]["a"] = {"0": 1}


LOST = {
    less_decay: "optim.param_groups.1.weight_decay",
    more_options: "optim.param_groups.0.initial_lr",
    no_steps: "optim.state.",
    an_empty_group: "optim.param_groups",
    one_group: "optim.param_groups",
    other_groups: "optim.param_groups",
    keys_of_text: "config.a",
}


@pytest.fixture
def saved(tmp_path):
    def save(name, tree):
        torch.save(tree, tmp_path / name)
        return str(tmp_path / name)

    return save


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("lose", LOST)
def test_it_is_named_whoever_has_lost_it(saved, answers, lose, turned):
    tree = training(named=turned)
    lose(tree)
    path, original = saved("run.pt", tree), saved("original.pt", training(named=not turned))
    assert ckptmove.diff(saved("whole.pt", training(named=turned)), original).same
    for pair in ((path, original), (original, path)):
        found = ckptmove.diff(*pair)
        assert [one.name for one in found.changed if LOST[lose] in one.name], found
        restore = answers(pair[0], against=pair[1])["restore"]
        assert (restore["status"], LOST[lose] in restore["detail"]) == ("failed", True)


def test_an_object_among_the_options_is_said_not_to_be_compared(saved, answers):
    path, original = (training(named=named) for named in (True, False))
    path["optim"]["param_groups"][0]["conf"], original["optim"]["param_groups"][0]["conf"] = {"a": 1}, {"a": 2}
    path["optim"]["param_groups"][1]["conf"], original["optim"]["param_groups"][1]["conf"] = {"a": 1}, {"a": 2}
    path, original = saved("run.pt", path), saved("original.pt", original)
    said = "optim.param_groups.0.conf and 1 more not compared: not a plain value"
    assert said in ckptmove.diff(path, original).notes
    assert said in answers(path, against=original)["restore"]["detail"]


def test_parameters_that_no_tensor_tells_apart_leave_their_optimizer_as_it_lies(saved):
    path, original = training(named=True), training(named=False)
    del path["model"], original["model"]
    found = ckptmove.diff(saved("run.pt", path), saved("original.pt", original))
    assert any(one.startswith("optim ") and "matched" in one for one in found.notes)
    assert not found.same


def test_options_of_parameters_that_nothing_tells_apart_are_not_passed_over(saved):
    path, original = training(named=True), training(named=False)
    for tree in (path, original):
        del tree["model"]
        tree["optim"]["state"] = {}  # as plain SGD leaves it: no tensor is missing on either side
    path["optim"]["param_groups"][0]["lr"] = 0.7
    found = ckptmove.diff(saved("run.pt", path), saved("original.pt", original))
    assert "optim.param_groups.0.lr" in {one.name for one in found.changed}


def test_a_zip_of_something_else_among_the_objects_is_no_damage(distributed, tmp_path):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("x.npy", b"numbers")
    folder = distributed.save_ranks(tmp_path / "run", {}, {"held": (0, held.getvalue())})
    assert "F802" not in {one.code for one in ckptmove.inspect(folder, check=True).findings}
    assert ckptmove.convert(folder, to="cpu", output=tmp_path / "copy").output
    spoiled = distributed.save_ranks(tmp_path / "spoiled", {}, {"held": (0, b"?" + held.getvalue()[1:])})
    assert "F802" in {one.code for one in ckptmove.inspect(spoiled, check=True).findings}


def inflating():
    """A piece of a few bytes, and of 80,000 operations."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + b"N0" * 40_000 + b"N.")
        archive.writestr("a/version", b"3")
    return packed.getvalue()


def test_objects_that_inflate_to_more_operations_than_all_may_have_are_refused(distributed, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptmove.assembled.dcp_pieces._OPERATIONS", 10_000)
    packed = inflating()
    objects = {f"held{number}": (0, packed) for number in range(3)}
    folder = distributed.save_ranks(tmp_path / "run", {}, objects)
    for command in (
        lambda: ckptmove.inspect(folder),
        lambda: ckptmove.inspect(folder, check=True),
        lambda: ckptmove.convert(folder, to="cpu", output=tmp_path / "out"),
    ):
        with pytest.raises(LimitExceeded, match="operations"):
            command()
    assert ckptmove.inspect(folder, limits=Limits().times(100)).inventory


def test_chunks_that_inflate_to_more_operations_than_all_may_have_are_refused(distributed, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptmove.assembled.dcp_pieces._OPERATIONS", 10_000)
    packed = inflating()
    one = distributed.save_ranks(tmp_path / "run", {"w": (torch.ones(2, 3), [(0, (0, 0), (2, 3))])})
    (one / "__0_0.distcp").write_bytes(packed)

    def point(metadata):
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = replace(place, offset=0, length=len(packed))

    distributed.change(one, point)
    for command in (
        lambda: ckptmove.inspect(one, check=True),
        lambda: ckptmove.convert(one, to="cpu", output=tmp_path / "out"),
        lambda: ckptmove.diff(one, one),
    ):
        with pytest.raises(LimitExceeded, match="operations"):
            command()


def test_two_numbers_of_ranks_write_the_keys_in_two_orders_and_hold_the_same(distributed, tmp_path):
    for name, keys in (("one", ("step", "exp_avg")), ("other", ("exp_avg", "step"))):
        distributed.save(tmp_path / name, {"state": dict.fromkeys(keys, 1)})
    assert ckptmove.diff(tmp_path / "one", tmp_path / "other").same


def test_the_shares_of_ranks_are_no_checkpoints_of_their_own(distributed, tmp_path):
    rows = [(0, (0, 0), (2, 2)), (1, (2, 0), (2, 2))]
    found = ckptmove.inspect(distributed.save_ranks(tmp_path / "run", {"w": (torch.ones(4, 2), rows)})).inventory
    files = [file._replace(roles=("model", "optimizer")) for file in found.files]
    assert [file.path for file in files] == ["__0_0.distcp", "__1_0.distcp"]
    assert replace(found, files=tuple(files)).checkpoints == ()
    files = [file._replace(path=f"{rank}.pt", is_piece=False) for rank, file in enumerate(files)]
    assert replace(found, files=tuple(files)).checkpoints == ("0.pt", "1.pt")
