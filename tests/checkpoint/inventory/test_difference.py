"""Comparison of the trees of real pickles, and each kind of difference."""

from __future__ import annotations

import argparse
import io
import math
import pickle
from collections import OrderedDict

import pytest
import torch

from ckptmove.checkpoint.inventory import difference
from ckptmove.checkpoint.inventory.difference import tree_changes
from ckptmove.checkpoint.inventory.tensor_nodes import named_items
from ckptmove.comparison.other_content import device_sites
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.tree import Call, Global, Tuple


def differences(ours, theirs, protocol=4):
    mine, other = (interpret(pickle.dumps(value, protocol), Limits()).root for value in (ours, theirs))
    return sorted(map(str, tree_changes(mine, (), other, ())))


def circle(size=1):
    items = [1] * size
    items.append(items)
    return items


SHARED = [1, 2]
SAME = [
    {"a": [1, 2.5, None, True, "text", b"bytes", (1, 2)], 3: {"x"}, (1, "two"): 4, None: 5},
    argparse.Namespace(lr=1, nested=OrderedDict(a=1)),
    circle(),
    [SHARED, SHARED],
    [math.nan, math.inf, -0.0],
    2**5000,
    complex(1, 2),
    frozenset({3}),
    int,
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", SAME, ids=lambda value: type(value).__name__)
def test_a_tree_equals_itself(value, protocol):
    assert differences(value, value, protocol) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (1, 2, ["the root is 1 in place of 2"]),
        ({"a": 1}, {"a": True}, ["a is 1 in place of True"]),
        ({"a": 0.0}, {"a": -0.0}, ["a is 0.0 in place of -0.0"]),
        ({"a": 1}, {}, ["a is 1 in place of absent"]),
        ({}, {"a": {"b": None}}, ["a is absent in place of a dict"]),
        ({"a": None}, {}, ["a is None in place of absent"]),
        ({1: "x"}, {"1": "y"}, ["1 is 'x' in place of 'y'", "the type of the key 1 is 'int' in place of 'str'"]),
        ({1: "x", "1": "y"}, {"1": "y"}, ["1 is 'x' in place of absent"]),
        (
            {True: "x"},
            {"True": "x", 1.5: "x"},
            ["1.5 is absent in place of 'x'", "the type of the key True is 'bool' in place of 'str'"],
        ),
        ({(1, 2): 1}, {(1, 2): 2}, ["(1, 2) is 1 in place of 2"]),
        ({int: 1}, {int: 2}, ["builtins.int is 1 in place of 2"]),
        ([1, [2, 3]], [1, [2]], ["the length of 1 is 2 in place of 1"]),
        ([], [1], ["the length of the root is 0 in place of 1"]),
        ([1], (1,), ["the root is a list in place of a tuple"]),
        ({"f": int}, {"f": str}, ["f is 'builtins.int' in place of 'builtins.str'"]),
        ({"f": int}, {"f": 1}, ["f is a global in place of 1"]),
        (complex(1, 2), complex(1, 3), ["1 is 2.0 in place of 3.0"]),
        ({"a": range(3)}, {"a": {1}}, ["a is a builtins.range in place of a set"]),
        (argparse.Namespace(lr=1), argparse.Namespace(lr=2), ["lr is 1 in place of 2"]),
        (2**5000, 2**5000 + 1, None),
        ("x" * 100, "y", ["the root is '" + "x" * 59 + "... in place of 'y'"]),
        (circle(2), circle(3), ["the length of the root is 3 in place of 4"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_differs_is_named(ours, theirs, said):
    found = differences(ours, theirs)
    if said is None:
        assert len(found) == 1
        assert len(found[0]) < 200
    else:
        assert found == said


def read(value, path):
    torch.save(value, path)
    with open_checkpoint(str(path), Limits()) as checkpoint:
        (file,) = checkpoint.parts
        return file.tree(), device_sites(file.inventory)


def compared(ours, theirs, folder):
    changes = tree_changes(*read(ours, folder / "ours.pt"), *read(theirs, folder / "theirs.pt"))
    return sorted((change.path, change.ours, change.theirs) for change in changes)


def test_another_sharing_of_the_same_tensors_is_no_difference(tmp_path):
    whole = torch.arange(6.0)
    assert compared([whole[:3], whole[3:]], [whole[:3].clone(), whole[3:].clone()], tmp_path) == []


def test_what_a_tensor_is_made_of_counts(tmp_path):
    assert compared(torch.ones(2), torch.ones(3), tmp_path) == [("0.0", "2", "3")]
    assert compared(torch.ones(2, requires_grad=True), torch.ones(2), tmp_path) == [("2", "True", "False")]
    (kind,) = compared(torch.nn.Parameter(torch.ones(2)), torch.ones(2), tmp_path)[-1:]
    assert "_rebuild_parameter" in kind[1]


def test_every_one_of_many_tensors_is_looked_at(tmp_path):
    """Temporary objects of a comparison must not be confused with objects that were compared before."""
    ours = [torch.ones(1, requires_grad=index == 40) for index in range(80)]
    assert compared(ours, [torch.ones(1) for _ in range(80)], tmp_path) == [("40.2", "True", "False")]


def test_the_order_of_keys_and_what_is_set_on_an_object_count(tmp_path):
    layer = torch.nn.Linear(1, 1).state_dict()
    turned = OrderedDict(reversed(layer.items()))
    turned._metadata = layer._metadata
    [(path, *orders)] = compared(turned, layer, tmp_path)
    assert ("order" in path, orders) == (True, ["'bias, weight'", "'weight, bias'"])
    assert compared(OrderedDict(layer), layer, tmp_path) == [("the attributes of the root", "None", "a dict")]


def test_a_named_device_may_differ_and_what_is_no_device_may_not(tmp_path):
    ours = {"device": torch.device("cuda", 1), "where": "cuda:0", "of": torch.device("cpu")}
    assert compared(ours, {**ours, "device": torch.device("cpu"), "where": "cpu"}, tmp_path) == []
    assert compared(ours, {**ours, "where": "cudas"}, tmp_path) == [("where", "'cuda:0'", "'cudas'")]
    assert compared(ours, {**ours, "where": 3}, tmp_path) == [("where", "'cuda:0'", "3")]


class WithIds(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.pid if isinstance(obj, argparse.Namespace) else None


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (("storage", 1), ("storage", 2), []),
        (("module", "a"), ("module", "a"), []),
        (("module", "a"), ("module", "b"), ["x.1 is 'a' in place of 'b'"]),
        ("text", "other", ["x is 'text' in place of 'other'"]),
    ],
)
def test_persistent_ids_of_storages_are_not_compared_and_others_are(ours, theirs, said):
    roots = []
    for pid in (ours, theirs):
        stream = io.BytesIO()
        WithIds(stream, 2).dump({"x": argparse.Namespace(pid=pid)})
        roots.append(interpret(stream.getvalue(), Limits()).root)
    assert list(map(str, tree_changes(roots[0], (), roots[1], ()))) == said


def test_out_of_band_buffers_are_compared_by_what_they_are():
    one = pickle.dumps(pickle.PickleBuffer(b"x"), 5, buffer_callback=lambda _: False)
    mine, other = (interpret(one, Limits()).root for _ in range(2))
    assert list(map(str, tree_changes(mine, (), other, ()))) == []


def test_a_list_that_holds_itself_many_times_is_gone_through_once(monkeypatch):
    itself = []
    itself += [itself] * 50
    gone_through = []
    items = difference._items
    monkeypatch.setattr(difference, "_items", lambda *sides: gone_through.append(sides) or items(*sides))
    assert differences(itself, itself) == []
    assert len(gone_through) == 1


def test_an_object_that_is_no_dict_and_no_list_has_no_members():
    assert list(named_items(Call(Global("a", "B"), Tuple((1,), (0,)), 0))) == []
