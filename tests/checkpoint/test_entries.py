from __future__ import annotations

import collections

import pytest
import torch
from torch import nn
from trees import SavedTree

from ckptmove.checkpoint.entries import entries, pairs_of
from ckptmove.model import Inventory
from ckptmove.pickles.tree import Call, Dict, Global, List, Tuple

EMPTY = Inventory(path="x", container="torch-zip", layout="plain", size_bytes=0)


def call(name, *arguments):
    return Call(Global(*name.rsplit(".", 1)), Tuple(arguments, (-1,) * len(arguments)), -1)


def listed(*items):
    return List(list(items), [-1] * len(items))


def test_entries_have_the_paths_and_the_roles_of_inspect(tmp_path) -> None:
    content = {
        "state_dict": nn.Linear(2, 1).state_dict(),
        "nets": [{"a.weight": torch.ones(1)}, (torch.ones(1), {"b": 2})],
        "whole": nn.Linear(1, 1),
        "optimizer_states": [],
        "meta": {},
        7: "x",
    }
    tree = SavedTree(tmp_path, content)
    found = {entry.path: entry for entry in entries(tree.root, tree.inventory)}
    roles = {path: entry.role for path, entry in found.items()}
    assert roles == {
        "": None,
        "state_dict": "model",
        "state_dict.weight": "model",
        "state_dict.bias": "model",
        "nets": None,
        "nets.0": "model",
        "nets.0.a.weight": "model",
        "nets.1": None,
        "nets.1.0": "other",
        "nets.1.1": None,
        "nets.1.1.b": "other",
        "whole": "model",
        "optimizer_states": "optimizer",
        "meta": "other",
        "7": "other",
    }
    tensors = {tensor.name for tensor in tree.inventory.tensors if not tensor.name.startswith("whole")}
    assert {path for path, entry in found.items() if entry.is_tensor} == tensors
    for entry in list(found.values())[1:]:
        values = entry.holder.flat if isinstance(entry.holder, Dict) else entry.holder.items
        assert values[entry.place] is entry.value


def test_a_container_is_entered_once(tmp_path) -> None:
    shared = {"a": 1}
    tree = SavedTree(tmp_path, {"x": shared, "y": [shared]})
    found = entries(tree.root, tree.inventory)
    paths = [entry.path for entry in found]
    assert paths == ["", "x", "y", "x.a", "y.0"]
    assert [entry.same for entry in found] == [-1, -1, -1, -1, paths.index("x")]


def test_deep_trees_need_no_recursion() -> None:
    root = leaf = listed()
    for _ in range(10_000):
        leaf.items.append(listed())
        leaf.starts.append(-1)
        leaf = leaf.items[0]
    assert len(entries(root, EMPTY)) == 10_001


def test_the_last_value_of_a_repeated_key_counts() -> None:
    root = Dict(["a", 1, "b", 2, "a", 3], [-1] * 6)
    assert [(entry.path, entry.value) for entry in entries(root, EMPTY)[1:]] == [("a", 3), ("b", 2)]
    assert len(root.flat) == len(root.starts) == 4


def test_the_pairs_of_python_2_can_be_edited() -> None:
    value = call("collections.OrderedDict", listed(listed("a", 1), listed("b", 2)))
    pairs = pairs_of(value)
    assert pairs.flat == ["a", 1, "b", 2]
    assert value.assigned is pairs
    assert value.args.items == ()


@pytest.mark.parametrize("arguments", [(), (Global("builtins", "list"),)])
def test_an_empty_dict_keeps_its_arguments(arguments) -> None:
    value = call("collections.defaultdict", *arguments)
    assert pairs_of(value).flat == []
    assert value.args.items == arguments
    assert value.assigned is None


def test_the_pairs_of_a_counter_are_in_its_arguments(tmp_path) -> None:
    tree = SavedTree(tmp_path, collections.Counter("aab"))
    pairs_of(tree.root).flat[0] = "c"
    assert tree.load(tree.root) == {"c": 2, "b": 1}
