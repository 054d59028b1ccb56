"""The nested values of an optimizer's state, as a file lists them and as the optimizer had them."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.step.entries import foreign_kind, leaves, nested_state


class Factors(NamedTuple):
    """As an optimizer of another library keeps them."""

    left: torch.Tensor
    rank: int


TENSOR = torch.arange(3.0)


def entry_of(state, path):
    group = {"lr": 0.1, "mine": 1, "params": [0]}
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": {"state": {0: state}, "param_groups": [group]}}, path)
    with open_checkpoint(str(path), Limits()) as whole:
        return whole.inventory.optimizers[0].state[0]


def made_again(entry):
    return nested_state(entry, {key: TENSOR for key, _ in entry.tensors})


@pytest.mark.parametrize(
    "state",
    [
        {"a": TENSOR, "step": 3},
        {"al": [None, TENSOR, None], "old_dirs": [], "t": 0.5},
        {"factors": [(TENSOR, None), [[]], {"x": TENSOR, "y.z": {"deep": [TENSOR] * 11}}], "on": True, "name": "x"},
        {"dotted.key": TENSOR, "other": {"key": 1, "key.of": [2]}},
        {"empty": {}, "none": None, "pair": ()},
        {"ordered": OrderedDict(a=TENSOR, b=[1])},
        {"al": [TENSOR], "al.key": 3, "al.0.key": TENSOR},
        {"a": {1: TENSOR, "b": 2, None: [TENSOR], 0.5: {2: {"x": TENSOR}, True: (TENSOR,)}}},
        {0: TENSOR, "step": 1, 2: {"m": [{3: TENSOR}]}},
        {},
    ],
    ids=str,
)
def test_what_an_optimizer_keeps_is_made_again(state, tmp_path):
    entry = entry_of(state, tmp_path / "c.pt")
    assert foreign_kind(entry) == ""
    assert made_again(entry) == state


def test_a_number_of_numpy_is_a_number(tmp_path):
    entry = entry_of({"k": np.float64(0.5), "in": [np.int64(7)]}, tmp_path / "c.pt")
    assert made_again(entry) == {"k": 0.5, "in": [7]}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": {(1, 2): TENSOR}}, "a (a dict with keys that are objects)"),
        ({"a": {1: TENSOR, "1": TENSOR}}, "a (a dict with keys of the same text)"),
        ({1: TENSOR, "1": TENSOR}, "(a dict with keys of the same text)"),
        ({"a": [{3}]}, "a.0 (__builtin__.set)"),
        ({"a": Namespace(x=1)}, "a (argparse.Namespace)"),
        ({"a": defaultdict(list, b=1)}, "a (collections.defaultdict)"),
        ({"a": torch.device("cuda:0")}, "a (torch.device)"),
    ],
    ids=str,
)
def test_what_cannot_be_made_again_is_named_and_left_out(state, said, tmp_path):
    entry = entry_of(state, tmp_path / "c.pt")
    assert foreign_kind(entry) == said
    assert "b" not in made_again(entry)


def test_leaves_are_named_as_the_file_names_them(tmp_path):
    state = {"al": [None, TENSOR], "x": ({"y": 1},), "step": 3}
    entry = entry_of(state, tmp_path / "c.pt")
    found = leaves(state)
    assert set(found) == {key for key, _ in (*entry.tensors, *entry.scalars)}
    assert found["al.1"] is TENSOR
    assert leaves({}) == {}


def test_a_named_tuple_is_opened_as_the_file_has_it_for_a_tensor_may_be_in_it(tmp_path):
    state = {"x": Factors(TENSOR, 2)}
    entry = entry_of(state, tmp_path / "c.pt")
    found = leaves(state)
    assert set(found) == {key for key, _ in (*entry.tensors, *entry.scalars)} == {"x.0", "x.1"}
    assert found["x.0"] is TENSOR


def test_sizes_are_opened_to_their_numbers():
    assert leaves({"shape": torch.Size([2, 3]), "in": [torch.Size([1])]}) == {"shape.0": 2, "shape.1": 3, "in.0.0": 1}
