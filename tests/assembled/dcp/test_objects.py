"""Objects other than tensors, compared with an original, for files and distributed checkpoints in all forms of keys."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, UserDict

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptmove

FORMS = ("number.pt", "name.pt", "flat.pt", "number.dcp", "name.dcp", "flat.dcp")


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    groups = [
        {"params": list(layer.parameters()), "weight_decay": decay}
        for layer, decay in zip(model, (0, 0.1), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(3):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()


class Saver:
    """Saves one training in each form."""

    def __init__(self, distributed, folder):
        self.distributed = distributed
        self.folder = folder
        self.training = trained()

    def tree(self, how):
        model, optimizer, scheduler = self.training
        if how == "number":
            states = model.state_dict(), optimizer.state_dict()
        else:
            options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
            states = get_state_dict(model, optimizer, options=options)
        config = {"sizes": [1, {"deep": "x"}, (2, 3)], "shape": torch.Size([4]), 5: {}, "none": None, "list": []}
        tree = {"model": states[0], "optim": states[1], "scheduler": scheduler, "epoch": 2, "config": config}
        return copy.deepcopy(tree)

    def save(self, form, change=lambda tree: None, name="run"):
        how, _, kind = form.partition(".")
        tree = self.tree(how)
        change(tree)
        path = self.folder / f"{name}.{form}"
        if kind == "pt":
            torch.save(tree, path)
        else:
            self.distributed.save(path, tree)
        return str(path)


@pytest.fixture
def saver(distributed, tmp_path):
    return Saver(distributed, tmp_path)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("form", "other"), [(one, FORMS[index - step]) for index, one in enumerate(FORMS) for step in (1, 3)]
)
def test_one_training_is_the_same_in_every_form(saver, answers, form, other):
    path, original = saver.save(form), saver.save(other)
    found = answers(path, against=original)
    assert {found[name]["status"] for name in ("restore", "numbers", "step", "parity", "fresh")} == {"passed"}, found
    result = ckptmove.diff(path, original)
    assert result.same, result
    spelled = "optim has different keys on the other side: compared parameter by parameter"
    is_alike = form.partition(".")[0] == other.partition(".")[0]
    assert (spelled in result.notes, spelled in found["restore"]["detail"]) == (not is_alike, not is_alike)
    what = "all equal" if is_alike else "every tensor equals"
    assert f"; {what} {original}, ignoring devices" in found["restore"]["detail"]


def set_epoch(tree):
    tree["epoch"] = 3


def set_schedule(tree):
    tree["scheduler"]["last_epoch"] = 7


def set_config(tree):
    tree["config"]["sizes"][1]["deep"] = "y"


def set_pair(tree):
    tree["config"]["sizes"][2] = (2, 4)


def set_kind(tree):
    tree["config"]["shape"] = [4]


def lose_epoch(tree):
    del tree["epoch"]


def add_to_config(tree):
    tree["config"]["more"] = {"a": 1}


def nest_epoch(tree):
    tree["epoch"] = {"number": 2}


CHANGES = {
    set_epoch: ("epoch", "3", "2"),
    set_schedule: ("scheduler.last_epoch", "7", "0"),
    set_config: ("config.sizes.1.deep", "'y'", "'x'"),
    set_pair: ("config.sizes.2.1", "4", "3"),
    set_kind: ("config.shape", "a list", "a torch.Size"),
    lose_epoch: ("epoch", "absent", "2"),
    add_to_config: ("config.more.a", "1", "absent"),
    nest_epoch: ("epoch", "a dict", "2"),
}


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("form", "other", "change"),
    [
        (*pair, change)
        for turn, pair in enumerate([("number.pt", "number.dcp"), ("name.dcp", "flat.dcp"), ("flat.dcp", "number.pt")])
        for index, change in enumerate(CHANGES)
        if index % 3 == turn or change is set_kind
    ],
)
def test_what_has_changed_is_named(saver, answers, form, other, change):
    where, mine, theirs = CHANGES[change]
    path, original = saver.save(form, change), saver.save(other)
    restore = answers(path, against=original)["restore"]
    if change is set_kind and "pt" in form + other:  # it may have been made from the list on the other side
        assert restore["status"] == "passed"
        assert f"; {where} not compared" in restore["detail"]
        return
    assert restore["status"] == "failed"
    assert where in restore["detail"]
    assert restore["evidence"]["changed"] == 1
    assert [(one.name, one.source, one.target) for one in ckptmove.diff(path, original).changed] == [
        (where, mine, theirs)
    ]


def set_rate(tree):
    optim = tree["optim"]
    if "param_groups" in optim:
        optim["param_groups"][1]["lr"] = 0.02
    else:
        for name in ("weight", "bias"):
            optim[f"param_groups.1.{name}.lr"] = 0.02


@pytest.mark.unmeasured
@pytest.mark.parametrize(("form", "other"), [(one, other) for one in FORMS for other in FORMS if one != other][::3])
def test_an_option_of_another_value_is_named_once_for_a_group(saver, answers, form, other):
    path, original = saver.save(form, set_rate), saver.save(other)
    found = [(one.name, one.source, one.target) for one in ckptmove.diff(path, original).changed]
    parameters = ["1.weight", "1.bias"] if form.startswith("flat") else ["1"]
    assert sorted(found) == sorted((f"optim.param_groups.{one}.lr", "0.02", "0.01") for one in parameters)
    restore = answers(path, against=original)["restore"]
    assert restore["status"] == "failed"
    assert f"optim.param_groups.{parameters[0]}.lr is 0.02 " in restore["detail"]


def set_moment(tree):
    state = tree["optim"].get("state", tree["optim"])
    value = next(one for key, one in state.items() if key in {3, "1.bias", "state.1.bias.exp_avg"})
    (value if isinstance(value, torch.Tensor) else value["exp_avg"])[1] += 1


@pytest.mark.parametrize(
    ("form", "other"), [("number.pt", "name.dcp"), ("flat.dcp", "number.dcp"), ("name.pt", "number.pt")]
)
def test_a_moment_is_held_against_that_of_its_own_parameter(saver, answers, form, other):
    path, original = saver.save(form, set_moment), saver.save(other)
    (change,) = ckptmove.diff(path, original).changed
    assert (change.what, change.name.rpartition(".")[2], change.gap.max_abs) == ("value", "exp_avg", 1.0)
    restore = answers(path, against=original)["restore"]
    assert f"{change.name}: other bits" in restore["detail"]


def test_flags_that_follow_the_device_are_no_loss_and_a_difference(saver, answers):
    def capture(tree):
        for group in tree["optim"]["param_groups"]:
            group["capturable"] = True

    path, original = saver.save("name.pt"), saver.save("flat.dcp")
    assert answers(path, against=original)["restore"]["status"] == "passed"
    path = saver.save("name.pt", capture)
    assert answers(path, against=original)["restore"]["status"] == "passed"
    assert {one.name for one in ckptmove.diff(path, original).changed} == {
        f"optim.param_groups.{index}.capturable" for index in (0, 1)
    }


def test_counts_that_are_no_tensors_are_compared_too(saver, answers):
    def count(number):
        def change(tree):
            for key, state in tree["optim"]["state"].items():
                state["step"] = number if key in {0, "0.weight"} else 3

        return change

    path, original = saver.save("number.pt", count(3)), saver.save("name.pt", count(3))
    assert answers(path, against=original)["restore"]["status"] == "passed"
    path = saver.save("number.pt", count(4))
    assert answers(path, against=original)["restore"]["status"] == "failed"
    found = [(one.name, one.source, one.target) for one in ckptmove.diff(path, original).changed]
    assert found == [("optim.state.0.step", "4", "3")]


def test_which_parameter_is_which_is_not_guessed(saver, answers):
    """Parameters of models with different names cannot be matched."""

    def rename(tree):
        tree["model"] = OrderedDict((f"net.{name}", value) for name, value in tree["model"].items())

    path, original = saver.save("number.pt", rename), saver.save("name.pt")
    result = ckptmove.diff(path, original)
    assert "optim.state.0.exp_avg" in result.removed
    assert "optim.state.0.weight.exp_avg" in result.added
    assert any(note.startswith("optim ") and "matched" in note for note in result.notes)
    restore = answers(path, against=original)["restore"]
    assert restore["status"] == "passed"
    assert "paired by content alone: optim.state." in restore["detail"]


class Config(UserDict):
    """A mapping of a class; a distributed checkpoint stores its items."""


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_what_a_distributed_checkpoint_keeps_too_little_of_is_said(distributed, tmp_path, answers):
    tree = {"w": torch.ones(2), "own": {"t": torch.ones(1)}, "config": Config(a=1), "epoch": 1}
    torch.save(tree, tmp_path / "run.pt")
    nested = (torch.ones(1),)  # a distributed checkpoint saves a tuple whole
    folder = distributed.save(tmp_path / "run", {**tree, "config": Config(a=1), "own": nested})
    result = ckptmove.diff(str(tmp_path / "run.pt"), str(folder))
    assert [one.name for one in result.changed] == ["own"]
    assert any(note.startswith("config not compared") for note in result.notes)
    assert (result.removed, result.added) == (("own.t",), ("own.0",))


def test_a_tensor_in_place_of_something_else_is_a_tensor_that_is_missing(distributed, tmp_path):
    torch.save({"w": torch.ones(2), "epoch": torch.tensor(2)}, tmp_path / "run.pt")
    folder = distributed.save(tmp_path / "run", {"w": torch.ones(2), "epoch": 2})
    result = ckptmove.diff(str(tmp_path / "run.pt"), str(folder))
    assert (result.removed, [one.name for one in result.changed]) == (("epoch",), [])


def test_lists_that_hold_themselves_end(distributed, tmp_path):
    knot = [1]
    knot.append(knot)
    torch.save({"w": torch.ones(2), "knot": knot}, tmp_path / "run.pt")
    folder = distributed.save_ranks(
        tmp_path / "run", {"w": (torch.ones(2), [(0, (0,), (2,))])}, {"knot": (0, saved(knot))}
    )
    assert ckptmove.diff(str(tmp_path / "run.pt"), str(folder)).same


def test_devices_may_differ_where_a_conversion_may_change_them(distributed, tmp_path, answers):
    tree = {"w": torch.ones(2), "where": torch.device("cuda:0"), "device": "cuda:0"}
    folder = distributed.save(tmp_path / "run", tree)
    moved = {**tree, "where": torch.device("cpu"), "device": "cpu"}
    torch.save(moved, tmp_path / "run.pt")
    assert answers(tmp_path / "run.pt", against=str(folder))["restore"]["status"] == "passed"
    torch.save({**moved, "device": "mine"}, tmp_path / "run.pt")
    restore = answers(tmp_path / "run.pt", against=str(folder))["restore"]
    assert (restore["status"], restore["evidence"]["changed"]) == ("failed", 1)
    assert "device is 'mine'" in restore["detail"]


@pytest.mark.parametrize(("count", "said"), [(4, []), (5, [("optim.state.ghost.step", "5", "4")])])
def test_state_that_no_group_lists_goes_by_its_own_key(saver, answers, count, said):
    def haunt(number):
        def change(tree):
            if "state" in tree["optim"]:
                tree["optim"]["state"]["ghost"] = {"step": number}
            else:
                tree["optim"]["state.ghost.step"] = number

        return change

    path, original = saver.save("name.pt", haunt(count)), saver.save("flat.dcp", haunt(4))
    found = [(one.name, one.source, one.target) for one in ckptmove.diff(path, original).changed]
    assert found == said
