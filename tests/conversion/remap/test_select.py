from __future__ import annotations

from enum import Enum
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from trees import SavedTree

from ckptmove.conversion.remap.errors import (
    InsideObject,
    ListItems,
    NeededByOptimizer,
    NoMatch,
    NothingLeft,
    SharedPart,
)
from ckptmove.conversion.remap.select import select
from ckptmove.model import Inventory
from ckptmove.moves import Dropped, Remap
from ckptmove.pickles.tree import Dict


@pytest.fixture
def selected(tmp_path):
    def change(content, **options):
        tree = SavedTree(tmp_path, content)
        root, dropped = select(tree.root, tree.inventory, Remap(**options))
        return tree.load(root), dropped

    return change


class Bag:
    """An object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def names(dropped):
    return {one.name for one in dropped}


def run(**optimizer_options):
    """A model of two layers with the optimizer, the scheduler and the scaler of its run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), **optimizer_options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr": scheduler.state_dict(),
        "amp": {},
        "rng": torch.get_rng_state(),
        "epoch": 3,
        "config": {"depth": 2, "betas": [0.9, 0.99]},
    }


# --- roles and globs -------------------------------------------------------------------------------------------------


def test_a_part_is_dropped_by_its_role(selected) -> None:
    content = run()
    loaded, dropped = selected(content, drop=("optimizer",))
    assert list(loaded) == ["model", "lr", "amp", "rng", "epoch", "config"]
    tensors = [one for entry in content["optimizer"]["state"].values() for one in entry.values()]
    nbytes = sum(one.untyped_storage().nbytes() for one in tensors)
    assert dropped == (Dropped("optimizer", len(tensors), nbytes, "drop"),)


@pytest.mark.parametrize(("role", "key"), [("scheduler", "lr"), ("scaler", "amp"), ("rng", "rng")])
def test_a_part_without_tensors_has_a_role(role, key, selected) -> None:
    loaded, dropped = selected(run(), drop=(role,))
    assert set(run()) - set(loaded) == {key}
    assert names(dropped) == {key}


def test_plain_values_have_the_role_other(selected) -> None:
    loaded, dropped = selected(run(), drop=("other",))
    assert list(loaded) == ["model", "optimizer", "lr", "amp", "rng"]
    assert names(dropped) == {"epoch", "config"}


def test_an_optimizer_in_a_state_dict_has_a_role_of_its_own(selected) -> None:
    """torchtitan writes the model's tensors at the root, beside the optimizer."""
    model = {f"layers.{key}": value for key, value in run()["model"].items()}
    content = {**model, "optimizer": run()["optimizer"], "step": 3}
    loaded, dropped = selected(content, only=("model",))
    assert list(loaded) == [*model, "step"]
    assert names(dropped) == {"optimizer"}
    loaded, _ = selected(content, drop=("model",))
    assert list(loaded) == ["optimizer"]


def test_only_a_role_stays(selected) -> None:
    loaded, dropped = selected(run(), only=("model",))
    assert list(loaded) == ["model"]
    assert nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).load_state_dict(loaded["model"], strict=True)
    assert {one.reason for one in dropped} == {"only"}
    assert names(dropped) == set(run()) - {"model"}


def test_several_words_of_only_are_united_and_drop_comes_last(selected) -> None:
    loaded, dropped = selected(run(), only=("model", "e*h", "config"), drop=("config.depth", "epoch"))
    assert list(loaded) == ["model", "config"]
    assert loaded["config"] == {"betas": [0.9, 0.99]}
    assert {one.name: one.reason for one in dropped if one.reason == "drop"} == {
        "epoch": "drop",
        "config.depth": "drop",
    }


def test_only_keeps_what_is_around_a_match_and_inside_one(selected) -> None:
    content = {"nets": {"g": {"a.weight": torch.ones(1), "a.bias": torch.ones(1)}, "d": {"weight": torch.ones(1)}}}
    loaded, dropped = selected(content, only=("nets.*.weight",))
    assert loaded == {"nets": {"g": {"a.weight": torch.ones(1)}, "d": {"weight": torch.ones(1)}}}
    assert dropped == (Dropped("nets.g.a.bias", 1, 4, "only"),)


def test_the_name_of_a_role_is_no_key(selected) -> None:
    content = {"model": {"a.weight": torch.ones(1)}, "net": {"other": {"a.weight": torch.ones(1)}}, "n": 1}
    loaded, dropped = selected(content, drop=("other",))
    assert "other" in loaded["net"]
    assert names(dropped) == {"n"}


def test_everything_in_a_dict_goes_with_the_dict(selected) -> None:
    loaded, dropped = selected(run(), drop=("config.*",))
    assert "config" not in loaded
    assert names(dropped) == {"config"}


def test_tied_tensors_count_once_in_each_part(selected) -> None:
    weight = torch.ones(4)
    content = {"model": {"a.weight": weight, "b.weight": weight[:2]}, "ema": {"a.weight": weight[2:]}, "n": 1}
    _, dropped = selected(content, drop=("model", "ema"))
    assert dropped == (Dropped("model", 2, 16, "drop"), Dropped("ema", 1, 8, "drop"))


def test_a_part_without_tensors_is_no_model(selected) -> None:
    content = {
        "model": {"a.weight": torch.ones(1), "version": 3, "_extra_state": {"a": 1}},
        "model_args": {"depth": 3, "betas": [1, 2]},
        "model_config": Bag(x=1),
        "loops": {"state_dict": {}},
    }
    loaded, dropped = selected(content, only=("model",))
    assert loaded == {"model": content["model"]}
    assert names(dropped) == {"model_args", "model_config", "loops"}


def test_a_loss_without_tensors_is_a_criterion(selected) -> None:
    loaded, dropped = selected({"loss": nn.CrossEntropyLoss(), "epoch": 1}, drop=("criterion",))
    assert (loaded, names(dropped)) == ({"epoch": 1}, {"loss"})


def test_parts_without_a_storage_count_their_bytes(selected) -> None:
    sparse = torch.eye(3).to_sparse()
    content = {"model": {"a.weight": sparse}, "ema": {"a.weight": torch.ones(2, device="meta")}, "n": 1}
    _, dropped = selected(content, drop=("model", "ema"))
    assert [one.nbytes for one in dropped] == [3 * 2 * 8 + 3 * 4, 0]


@pytest.mark.parametrize(
    ("option", "words", "near"),
    [("drop", ("optimiser",), "optimizer"), ("only", ("model", "confg"), "config"), ("drop", ("zzzz",), "model")],
)
def test_a_word_that_matches_nothing_is_an_error(option, words, near, selected) -> None:
    with pytest.raises(NoMatch) as caught:
        selected(run(), **{option: words})
    assert (caught.value.option, caught.value.word) == (f"--{option}", words[-1])
    assert caught.value.known[0] == near


@pytest.mark.parametrize("options", [{"drop": ("*",)}, {"only": ("model",), "drop": ("model",)}])
def test_something_stays(options, selected) -> None:
    with pytest.raises(NothingLeft):
        selected(run(), **options)


def test_the_root_has_a_role_too(selected) -> None:
    content = run()["model"]
    loaded, dropped = selected(content, only=("model",))
    assert (list(loaded), dropped) == (list(content), ())
    with pytest.raises(NothingLeft):
        selected(content, drop=("model",))


def test_nothing_is_asked_of_the_parts(selected) -> None:
    content = {"epoch": 1}
    assert selected(content) == (content, ())


# --- a new root ------------------------------------------------------------------------------------------------------


def test_a_part_becomes_the_root(selected) -> None:
    loaded, dropped = selected(run(), as_root="model")
    assert list(loaded) == list(run()["model"])
    assert names(dropped) == set(run()) - {"model"}
    assert {one.reason for one in dropped} == {"as-root"}


def test_globs_apply_to_paths_from_the_new_root(selected) -> None:
    content = {"run": run(), "notes": "x"}
    loaded, dropped = selected(content, as_root="run", only=("model",), drop=("model.0.bias", "optimizer"))
    assert list(loaded) == ["model"]
    assert set(loaded["model"]) == {"0.weight", "1.weight", "1.bias"}
    assert {"notes", "run.epoch", "run.optimizer", "run.model.0.bias"} <= names(dropped)


def test_the_new_root_has_the_role_of_its_part(selected) -> None:
    content = {"ema": {"state": {"a": torch.ones(1), "b": {}}}}
    loaded, _ = selected(content, as_root="ema.state", only=("ema",))
    assert set(loaded) == {"a", "b"}


def test_the_longest_key_with_a_dot_is_the_new_root(selected) -> None:
    content = {"a": {"b": {"c": [1]}}, "a.b": {"c": [2]}}
    assert selected(content, as_root="a.b.c")[0] == [2]


def test_a_tensor_or_an_item_of_a_list_can_be_the_root(selected) -> None:
    content = {"nets": [{"a.weight": torch.ones(1)}, {"a.weight": torch.zeros(1)}]}
    assert selected(content, as_root="nets.1")[0] == {"a.weight": torch.zeros(1)}
    assert selected(content, as_root="nets.1.a.weight")[0] == torch.zeros(1)


@pytest.mark.parametrize("path", ["modle", "epoch", "model.0"])
def test_an_unknown_root_is_an_error(path, selected) -> None:
    with pytest.raises(NoMatch) as caught:
        selected(run(), as_root=path)
    assert caught.value.option == "--as-root"
    assert "model" in caught.value.known


# --- refusals --------------------------------------------------------------------------------------------------------


def test_single_items_of_a_list_are_refused(selected) -> None:
    content = {"nets": [{"a.weight": torch.ones(1)}, ({"a.weight": torch.zeros(1), "b": 1},)], "n": 1}
    for options in ({"drop": ("nets.0",)}, {"only": ("nets.0.*",)}):
        with pytest.raises(ListItems) as caught:
            selected(content, **options)
        assert caught.value.where == "nets"
    loaded, dropped = selected(content, drop=("nets.?",))
    assert (loaded, names(dropped)) == ({"n": 1}, {"nets"})
    loaded, _ = selected(content, drop=("nets.1.0.b",))
    assert loaded["nets"][1] == ({"a.weight": torch.zeros(1)},)


def test_parts_of_a_pickled_object_are_refused(selected) -> None:
    content = {"model": nn.Sequential(nn.Linear(2, 2)), "epoch": 1}
    for options in ({"drop": ("model.0.bias",)}, {"only": ("*.weight",)}, {"as_root": "model.0"}):
        with pytest.raises(InsideObject) as caught:
            selected(content, **options)
        assert caught.value.where == "model"
    with pytest.raises(InsideObject) as caught:
        selected(content["model"], drop=("0.bias",))
    assert caught.value.where == ""


def test_an_object_has_the_role_of_its_content(tmp_path) -> None:
    content = {"bag": Bag(model=nn.Linear(1, 1)), "empty": Bag(x=1), "mixed": Bag(net=nn.Linear(1, 1), x=torch.ones(1))}
    content["late"] = 1
    for word in ("model", "other"):
        tree = SavedTree(tmp_path, content)
        with pytest.raises(InsideObject) as caught:
            select(tree.root, tree.inventory, Remap(drop=(word,)))
        assert caught.value.where == "mixed"
    del content["mixed"]
    for word, gone in (("model", {"bag"}), ("other", {"empty", "late"})):
        tree = SavedTree(tmp_path, content)
        _, dropped = select(tree.root, tree.inventory, Remap(drop=(word,)))
        assert names(dropped) == gone


class Choice(Enum):
    """As ``OptimizerNames`` and ``SchedulerType`` of transformers."""

    FUSED = "adamw_torch_fused"


@pytest.mark.parametrize("role", ["optimizer", "scheduler"])
def test_an_option_of_an_object_is_no_part_with_a_role(role, tmp_path) -> None:
    content = {**run(), "args": Bag(optim=Choice.FUSED, lr_scheduler_type=Choice.FUSED)}
    tree = SavedTree(tmp_path, content)
    _, dropped = select(tree.root, tree.inventory, Remap(drop=(role,)))
    assert names(dropped) == {"optimizer" if role == "optimizer" else "lr"}


def test_a_dict_at_two_paths_is_changed_for_none(selected) -> None:
    shared = {"a.weight": torch.ones(1), "a.bias": torch.ones(1)}
    content = {"model": shared, "ema": shared, "n": 1}
    for options in ({"drop": ("model.a.bias",)}, {"drop": ("ema.a.bias",)}):
        with pytest.raises(SharedPart) as caught:
            selected(content, **options)
        assert caught.value.names == ("model", "ema")
    for word in ("model", "ema"):
        loaded, dropped = selected(content, drop=(word,))
        assert names(dropped) == {word} == {"model", "ema"} - set(loaded)
        assert dropped[0].tensors == 2


def test_a_dict_that_holds_itself(selected) -> None:
    content = {"n": 1, "m": 2}
    content["self"] = content
    loaded, _ = selected(content, drop=("self",))
    assert loaded == {"n": 1, "m": 2}
    with pytest.raises(SharedPart):
        selected(content, drop=("n",))


# --- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"drop": ("optimizer.state.0",)}, "optimizer.state.0"),
        ({"drop": ("*.exp_avg",)}, "optimizer.state.0.exp_avg"),
        ({"only": ("model", "optimizer.param_groups")}, "optimizer.state"),
        ({"drop": ("model.1.*",)}, "model.1.weight"),
    ],
)
def test_an_optimizer_that_stays_keeps_its_parts_and_parameters(options, lost, selected) -> None:
    with pytest.raises(NeededByOptimizer) as caught:
        selected(run(), **options)
    assert caught.value.optimizer == "optimizer"
    assert caught.value.lost.startswith(lost)


def test_a_whole_model_may_go_without_its_optimizer(selected) -> None:
    loaded, _ = selected(run(), drop=("model",))
    assert "optimizer" in loaded
    loaded, _ = selected(run(), only=("model.0.*",))
    assert set(loaded["model"]) == {"0.weight", "0.bias"}


def test_buffers_may_go_without_the_optimizer(selected) -> None:
    content = run()
    content["model"]["1.running_mean"] = torch.ones(2)
    loaded, _ = selected(content, drop=("*.running_mean",))
    assert len(loaded["model"]) == 4


def test_an_optimizer_may_be_the_root_or_in_the_new_root(selected) -> None:
    content = run()
    with pytest.raises(NeededByOptimizer):
        selected(content["optimizer"], drop=("state",))
    with pytest.raises(NeededByOptimizer):
        selected({"run": content, "n": 1}, as_root="run.optimizer", drop=("param_groups",))
    loaded, _ = selected({"run": content, "net": content["model"]}, as_root="run", drop=("epoch",))
    assert "optimizer" in loaded
    loaded, _ = selected({"run": content, "net": {"w": {"a": 1, "b": 2}}}, as_root="net.w", drop=("a",))
    assert loaded == {"b": 2}


def test_parts_of_a_flat_optimizer_are_refused(tmp_path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(1, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    content = {"model": model.state_dict(), "opts": get_optimizer_state_dict(model, optimizer, options=options)}
    tree = SavedTree(tmp_path, content)
    with pytest.raises(NeededByOptimizer):
        select(tree.root, tree.inventory, Remap(drop=("opts.state.weight.*",)))
    root, dropped = select(tree.root, tree.inventory, Remap(drop=("optimizer",)))
    assert set(tree.load(root)) == {"model"}
    assert names(dropped) == {"opts"}


def test_other_keys_next_to_a_flat_optimizer_may_go(selected) -> None:
    flat = {"state.a.w.exp_avg": torch.ones(1), "param_groups.a.w.lr": 0.1, "note": "x", "b.w": torch.ones(1)}
    loaded, _ = selected(flat, drop=("note",))
    assert list(loaded) == ["state.a.w.exp_avg", "param_groups.a.w.lr", "b.w"]


# --- any tree --------------------------------------------------------------------------------------------------------

TREES = st.recursive(
    st.integers(0, 3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1), max_leaves=12
)
GLOBS = st.sampled_from(["a", "*.b", "?.a", "*c*", "a.b.*", "[ab].?"])


def as_tree(value):
    if not isinstance(value, dict):
        return value
    flat = [item for key, one in value.items() for item in (key, as_tree(one))]
    return Dict(flat, [-1] * len(flat))


def as_value(tree):
    return {key: as_value(one) for key, one, _ in tree.pairs()} if isinstance(tree, Dict) else tree


def leaves(value, path=()):
    if not isinstance(value, dict):
        return {path: value}
    return {key: one for name, inner in value.items() for key, one in leaves(inner, (*path, name)).items()}


def matches(path, globs):
    """Whether a glob matches a path or a path around it."""
    return any(fnmatchcase(".".join(path[:end]), glob) for end in range(1, len(path) + 1) for glob in globs)


@given(TREES.filter(lambda tree: isinstance(tree, dict)), st.sets(GLOBS, max_size=2), st.sets(GLOBS, max_size=2))
def test_the_values_that_stay_are_those_that_the_globs_say(value, only, drop) -> None:
    inventory = Inventory(path="x", container="torch-zip", layout="plain", size_bytes=0)
    tree, before = as_tree(value), leaves(value)
    remap = Remap(only=tuple(only), drop=tuple(drop))
    expected = {
        path: one for path, one in before.items() if (not only or matches(path, only)) and not matches(path, drop)
    }
    if not all(any(matches(path, {glob}) for path in before) for glob in only | drop):
        with pytest.raises(NoMatch):
            select(tree, inventory, remap)
    elif not expected:
        with pytest.raises(NothingLeft):
            select(tree, inventory, remap)
    else:
        root, dropped = select(tree, inventory, remap)
        assert leaves(as_value(root)) == expected
        assert {path for path in before if matches(path, names(dropped))} == set(before) - set(expected)
