from __future__ import annotations

import collections
import fnmatch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim.swa_utils import AveragedModel
from trees import SavedTree

from ckptmove.conversion.remap.errors import KeysCollide, NoMatch, PartialPrefix
from ckptmove.conversion.remap.rename import KeyMap, rename
from ckptmove.errors import UsageError
from ckptmove.moves import Remap, Renamed

WRAPPED = Remap(strip_prefix=())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 1)

    def forward(self, batch):
        return self.head(self.backbone(batch))


def stepped(model, optimizer):
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def renamed(tmp_path):
    def change(content, remap, **options):
        tree = SavedTree(tmp_path, content)
        changes = rename(tree.root, tree.inventory, remap, **options)
        return tree.load(tree.root), changes

    return change


def assert_equal_tensors(left, right):
    assert list(left) == list(right)
    for key, tensor in left.items():
        assert torch.equal(tensor, right[key]), key


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module."])
def test_the_prefix_of_a_wrapper_is_stripped_as_torch_strips_it(prefix, renamed) -> None:
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(prefix[:-1], Net())

    expected = Wrapper().state_dict()
    loaded, changes = renamed({"model": expected, "epoch": 3}, WRAPPED)
    consume_prefix_in_state_dict_if_present(expected, prefix)
    assert_equal_tensors(loaded["model"], expected)
    if prefix == "module.":  # torch looks for the key "_orig_mod" without its underscores' dot only
        assert dict(loaded["model"]._metadata) == dict(expected._metadata)
    assert Net().load_state_dict(loaded["model"], strict=True)
    assert changes[0] == Renamed("model", f"{prefix}backbone.0.weight", "backbone.0.weight")
    assert len(changes) == len(expected)


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
@pytest.mark.parametrize("words", [(), ("{}.",), ("module.", "{}.")])
def test_wrappers_inside_keys_are_stripped_everywhere(wrapper, words, renamed) -> None:
    net = Net()
    plain, modules = [*net.state_dict()], dict(net.state_dict()._metadata)
    optimizer = torch.optim.SGD([(f"backbone.{wrapper}.0.weight", net.backbone[0].weight)], momentum=0.9)
    net.backbone = type("Wrapper", (nn.Module,), {})()
    net.backbone.add_module(wrapper, Net().backbone)
    front = nn.DataParallel(net) if words in {(), ("module.", "{}.")} else net
    content = {"model": front.state_dict(), "optimizer": optimizer.state_dict()}
    remap = Remap(strip_prefix=tuple(one.format(wrapper) for one in words))
    loaded, changes = renamed(content, remap)
    assert [*loaded["model"]] == plain
    assert dict(loaded["model"]._metadata) == modules
    assert loaded["optimizer"]["param_groups"][0]["param_names"] == ["backbone.0.weight"]
    assert {change.where for change in changes} == {"model", "optimizer.param_groups.0.param_names"}


def test_a_wrapper_inside_some_keys_is_no_reason_to_refuse_the_others(renamed) -> None:
    content = {"model": {"module.a": torch.ones(1), "b._orig_mod.module.c": torch.ones(1)}}
    assert [*renamed(content, WRAPPED)[0]["model"]] == ["module.a", "b.module.c"]
    with pytest.raises(NoMatch):
        renamed(content, Remap(strip_prefix=("_fsdp_wrapped_module.",)))


def test_nested_wrappers_are_stripped_together(renamed) -> None:
    model = nn.DataParallel(torch.compile(Net(), backend="eager"))
    loaded, _ = renamed(model.state_dict(), WRAPPED)
    assert Net().load_state_dict(loaded, strict=True)
    assert dict(loaded._metadata) == dict(Net().state_dict()._metadata)


def test_a_module_below_a_wrapper_may_be_named_like_one(renamed) -> None:
    inner = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    loaded, _ = renamed(nn.DataParallel(inner).state_dict(), WRAPPED)
    assert inner.load_state_dict(loaded, strict=True)


def test_the_counter_of_an_averaged_model_keeps_its_key(renamed) -> None:
    loaded, _ = renamed({"ema": AveragedModel(Net()).state_dict()}, WRAPPED)
    assert loaded["ema"].pop("n_averaged") == 0
    assert Net().load_state_dict(loaded["ema"], strict=True)
    loaded, _ = renamed({"ema": nn.DataParallel(AveragedModel(Net())).state_dict()}, WRAPPED)
    assert "n_averaged" in loaded["ema"]
    assert "head.weight" in loaded["ema"]


@pytest.mark.parametrize("keys", [[], ["n_averaged"], ["module.n_averaged"], ["module."]])
def test_prefixes_end_before_the_end_of_a_key(keys) -> None:
    stripped = KeyMap(WRAPPED, keys)
    assert [stripped(key) for key in keys] == [key.removeprefix("module.") or key for key in keys]


def test_each_prefix_of_the_request_is_stripped_once(renamed) -> None:
    content = {"model": {"a.b.a.weight": torch.ones(1), "a.b.a.bias": torch.ones(1)}}
    loaded, _ = renamed(content, Remap(strip_prefix=("b.", "a.")))
    assert set(loaded["model"]) == {"a.weight", "a.bias"}


def test_a_prefix_is_added_to_models_averages_and_losses(renamed) -> None:
    content = {
        "model": Net().state_dict(),
        "ema": Net().state_dict(),
        "criterion": {"weight": torch.ones(1)},
        "config": {"lr": 1.0},
        "class_weights": torch.ones(3),
    }
    loaded, changes = renamed(content, Remap(add_prefix="module."))
    assert nn.DataParallel(Net()).load_state_dict(loaded["model"], strict=True)
    assert loaded["model"]._metadata["module"] == {"version": 1}
    assert "module" in loaded["ema"]._metadata
    assert set(loaded["criterion"]) == {"module.weight"}
    assert set(loaded) == set(content)
    assert set(loaded["config"]) == {"lr"}
    assert {change.where for change in changes} == {"model", "ema", "criterion"}


def test_a_prefix_without_a_dot_leaves_the_root_of_the_modules(renamed) -> None:
    loaded, _ = renamed(Net().state_dict(), Remap(add_prefix="my_"))
    assert loaded._metadata[""] == {"version": 1}
    assert loaded._metadata["my_head"] == {"version": 1}


def test_a_prefix_of_some_keys_is_refused(renamed) -> None:
    content = {"model": {"module.a": torch.ones(1), "module.b": torch.ones(1), "c.d": torch.ones(1)}}
    with pytest.raises(PartialPrefix) as caught:
        renamed(content, WRAPPED)
    assert (caught.value.prefix, caught.value.having, caught.value.lacking) == (
        "module.",
        ("module.a", "module.b"),
        ("c.d",),
    )
    with pytest.raises(PartialPrefix):
        renamed({"model": {"a.b.c": torch.ones(1), "a.d": torch.ones(1)}}, Remap(strip_prefix=("a.", "b.")))


def test_only_state_dicts_with_the_prefix_change(renamed) -> None:
    content = {"netG": nn.DataParallel(Net()).state_dict(), "netD": Net().state_dict()}
    loaded, changes = renamed(content, WRAPPED)
    assert Net().load_state_dict(loaded["netG"], strict=True)
    assert Net().load_state_dict(loaded["netD"], strict=True)
    assert {change.where for change in changes} == {"netG"}


@pytest.mark.parametrize(
    ("remap", "option", "word", "known"),
    [
        (WRAPPED, "--strip-prefix", "", ("backbone.", "head.")),
        (Remap(strip_prefix=("modul.",)), "--strip-prefix", "modul.", ("backbone.", "head.")),
        (Remap(rename=(("haed.weight", "x"),)), "--rename", "haed.weight=x", ("head.weight",)),
    ],
)
def test_an_option_that_changes_nothing_is_an_error(remap, option, word, known, renamed) -> None:
    with pytest.raises(NoMatch) as caught:
        renamed(Net().state_dict(), remap)
    assert (caught.value.option, caught.value.word) == (option, word)
    assert caught.value.known[: len(known)] == known


def test_a_file_without_state_dicts_has_no_keys_to_change(renamed) -> None:
    with pytest.raises(NoMatch) as caught:
        renamed({"epoch": 3}, Remap(add_prefix="a."))
    assert caught.value.known == ()


# --- globs -----------------------------------------------------------------------------------------------------------


def test_keys_and_modules_are_renamed_with_the_text_of_each_star(renamed) -> None:
    loaded, changes = renamed(
        {"model": Net().state_dict()}, Remap(rename=(("backbone.0.*", "conv.*"), ("back*.1.*", "*.bn.*")))
    )
    assert list(loaded["model"])[:3] == ["conv.weight", "conv.bias", "bone.bn.weight"]
    assert loaded["model"]._metadata["conv"] == {"version": 1}
    assert loaded["model"]._metadata["bone.bn"] == {"version": 2}
    assert "head" in loaded["model"]._metadata
    assert len(changes) == 7


def test_strip_then_rename_then_add(renamed) -> None:
    content = nn.DataParallel(Net()).state_dict()
    remap = Remap(strip_prefix=(), rename=(("head.*", "classifier.*"),), add_prefix="net.")
    loaded, changes = renamed(content, remap)
    assert "net.classifier.weight" in loaded
    assert Renamed("", "module.head.bias", "net.classifier.bias") in changes


def test_keys_that_become_one_are_refused(renamed) -> None:
    with pytest.raises(KeysCollide) as caught:
        renamed({"model": Net().state_dict()}, Remap(rename=(("head.weight", "head.bias"),)))
    assert (caught.value.where, caught.value.target) == ("model", "head.bias")
    assert set(caught.value.sources) == {"head.weight", "head.bias"}
    with pytest.raises(KeysCollide):
        renamed({"model": {**Net().state_dict(), "epoch": 3}}, Remap(rename=(("head.bias", "epoch"),)))


def test_the_stars_of_both_globs_correspond(renamed) -> None:
    with pytest.raises(UsageError, match=r"\*"):
        renamed(Net().state_dict(), Remap(rename=(("head.*", "tail"),)))


@given(st.text("ab.*", max_size=6), st.text("ab.", max_size=8))
def test_a_star_matches_as_in_fnmatch(pattern, key) -> None:
    swapped = KeyMap(Remap(rename=((pattern, pattern),)), [key])
    assert swapped(key) == key
    assert bool(swapped.used - {("--add-prefix", "")}) == fnmatch.fnmatchcase(key, pattern)


def test_a_map_of_keys_in_several_files(renamed) -> None:
    whole = KeyMap(Remap(strip_prefix=("a.",)), ["a.b", "a.c.d", "a.c.e"])
    assert [whole(key) for key in ("a.b", "a.c.d")] == ["b", "c.d"]
    content = collections.OrderedDict({"a.c.d": torch.ones(1), "a.c.e": torch.zeros(1)})
    loaded, _ = renamed(content, Remap(strip_prefix=("a.", "c.")), shared=whole)
    assert set(loaded) == {"c.d", "c.e"}


# --- optimizers ------------------------------------------------------------------------------------------------------


def test_param_names_follow_the_model(renamed) -> None:
    model = nn.DataParallel(Net())
    try:
        optimizer = stepped(model, torch.optim.Adam(model.named_parameters()))
    except TypeError:
        pytest.skip("optimizers of this torch store no names")
    loaded, changes = renamed({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, WRAPPED)
    fresh = Net()
    fresh.load_state_dict(loaded["model"], strict=True)
    resumed = torch.optim.Adam(fresh.named_parameters())
    resumed.load_state_dict(loaded["optimizer"])
    group = loaded["optimizer"]["param_groups"][0]
    assert group["param_names"] == [name for name, _ in fresh.named_parameters()]
    assert group["params"] == list(range(6))
    assert Renamed("optimizer.param_groups.0.param_names", "module.head.bias", "head.bias") in changes


@pytest.mark.parametrize("is_flat", [False, True])
def test_optimizers_keyed_by_name_follow_the_model(is_flat, renamed) -> None:
    model = Net()
    optimizer = stepped(model, torch.optim.Adam(model.parameters()))
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    content = get_optimizer_state_dict(model, optimizer, options=options)
    loaded, changes = renamed(
        {"model": model.state_dict(), "optim": content},
        Remap(rename=(("backbone.*", "encoder.*"),), add_prefix="net."),
    )
    text = str(content).replace("head.", "net.head.").replace("backbone.", "net.encoder.")
    assert str(loaded["optim"]) == text
    assert {change.where for change in changes if change.where.startswith("optim")} == (
        {"optim"} if is_flat else {"optim.param_groups.0.params", "optim.state"}
    )


def test_a_flat_optimizer_lists_all_names_once(renamed) -> None:
    names = ["module.a.w", "module.b.w"]
    content = {f"state.{name}.exp_avg": torch.ones(1) for name in names}
    content |= {
        f"param_groups.{name}.{option}": value
        for name in names
        for option, value in (("lr", 0.1), ("param_names", names))
    }
    loaded, changes = renamed(content | {"": 0}, WRAPPED)
    assert loaded["param_groups.a.w.param_names"] == ["a.w", "b.w"]
    assert loaded["state.b.w.exp_avg"] == 1
    assert len(changes) == 8


def test_a_flat_optimizer_may_be_next_to_a_state_dict(renamed) -> None:
    content = {
        "state.module.a.w.exp_avg": torch.ones(1),
        "param_groups.module.a.w.lr": 0.1,
        "module.a.w": torch.ones(1),
        "module.a.b": torch.ones(1),
    }
    loaded, _ = renamed({"first": content, "second": content}, WRAPPED)
    assert list(loaded["second"]) == ["state.a.w.exp_avg", "param_groups.a.w.lr", "a.w", "a.b"]
    loaded, changes = renamed({"first": content, "second": content}, Remap(add_prefix="net."))
    assert "state.net.module.a.w.exp_avg" in loaded["first"]
    assert len(changes) == 4


def test_numbers_and_pickled_optimizers_are_no_names(tmp_path) -> None:
    model = Net()
    optimizer = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    texts = optimizer.state_dict()
    texts["state"] = {str(key): value for key, value in texts["state"].items()}
    tree = SavedTree(
        tmp_path, {"model": model.state_dict(), "optimizer": texts, "optims": [optimizer.state_dict(), optimizer]}
    )
    changes = rename(tree.root, tree.inventory, Remap(add_prefix="a."))
    assert {change.where for change in changes} == {"model"}
    assert len(tree.inventory.optimizers) == 3


def test_a_string_that_pickle_shares_changes_only_as_a_key(renamed) -> None:
    key = "module.head.weight"
    content = {"model": {key: torch.ones(1), "module.head.bias": torch.ones(1)}, "frozen": [key], "best": key}
    loaded, _ = renamed(content, WRAPPED)
    assert loaded["frozen"] == [key]
    assert loaded["best"] == key
    assert set(loaded["model"]) == {"head.weight", "head.bias"}


def test_a_state_dict_at_two_paths_changes_once(renamed) -> None:
    shared = nn.DataParallel(nn.DataParallel(Net())).state_dict()
    loaded, changes = renamed({"model": shared, "ema": shared}, Remap(strip_prefix=("module.",)))
    assert loaded["model"] is loaded["ema"]
    assert "module.head.weight" in loaded["model"]
    assert len(changes) == len(shared)


def test_metadata_and_lists_at_two_paths_change_once(renamed) -> None:
    first, second = nn.DataParallel(Net()).state_dict(), nn.DataParallel(Net()).state_dict()
    second._metadata = first._metadata
    names = ["module.w"]
    state = {"module.w": {"step": torch.ones(1)}}
    group = {"params": ["module.w"], "param_names": names, "lr": 0.1}
    optimizers = [{"state": state, "param_groups": [dict(group)]} for _ in range(2)]
    loaded, _ = renamed({"model": first, "ema": second, "optimizers": optimizers}, Remap(add_prefix="a."))
    assert "a.module.head" in loaded["ema"]._metadata
    assert loaded["optimizers"][1]["param_groups"][0]["param_names"] == ["a.module.w"]
    assert list(loaded["optimizers"][1]["state"]) == ["a.module.w"]


def test_extra_state_and_generators_are_keys_of_a_state_dict(renamed) -> None:
    content = {
        "module.a.weight": torch.ones(1),
        "module.a.bias": torch.ones(1),
        "module._extra_state": {"module.x": torch.ones(1), "deep": {"module.y": torch.ones(1)}},
        "module.rng_state": torch.get_rng_state(),
        "epoch": 3,
        4: 5,
    }
    loaded, _ = renamed(content, WRAPPED)
    assert list(loaded) == ["a.weight", "a.bias", "_extra_state", "rng_state", "epoch", 4]
    assert list(loaded["_extra_state"]) == ["module.x", "deep"]
    assert list(loaded["_extra_state"]["deep"]) == ["module.y"]


def test_paths_of_a_new_root_are_those_of_the_file(tmp_path) -> None:
    tree = SavedTree(tmp_path, {"run": {"model": nn.DataParallel(Net()).state_dict()}})
    root = tree.root.get("run").get("model")
    changes = rename(root, tree.inventory, Remap(strip_prefix=(), as_root="run.model"))
    assert Net().load_state_dict(tree.load(root), strict=True)
    assert {change.where for change in changes} == {"run.model"}


def test_items_of_a_tuple_are_names_too(renamed) -> None:
    optimizer = {"state": {}, "param_groups": ({"params": ("module.a", "module.b"), "lr": 0.1}, 5)}
    loaded, _ = renamed({"optimizer": optimizer}, WRAPPED)
    assert loaded["optimizer"]["param_groups"][0]["params"] == ("a", "b")
