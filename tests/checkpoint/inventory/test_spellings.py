"""Names with the same text, distinguished by their keys."""

from __future__ import annotations

import argparse
import io
import pickle

import pytest
import torch

from ckptmove.checkpoint.inventory.budget import Budget
from ckptmove.checkpoint.inventory.spellings import spellings
from ckptmove.errors import LimitExceeded
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.machine import interpret

A, B = torch.ones(2), torch.zeros(3)


def spelled(value, folder, limits=Limits()):  # noqa: B008  # it never changes
    """The spellings of the tensors whose names read alike, in the order of the file."""
    torch.save(value, folder / "x.pt")
    with open_checkpoint(str(folder / "x.pt")) as checkpoint:
        tensors = checkpoint.inventory.tensors
        names = [tensor.name for tensor in tensors]
        alike = [tensor for tensor in tensors if names.count(tensor.name) > 1]
        budget = Budget(limits, checkpoint.file.pickle_bytes)
        told = spellings(checkpoint.file.tree(), {tensor.name for tensor in alike}, alike, budget)
        return [(tensor.name, told.get(id(tensor))) for tensor in alike]


def circle():
    held = {"": A, "x": A}
    held[""] = held
    return {"loop": held, 0: A, "0": B}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({0: A, "0": B}, [("0", ("int 0",)), ("0", ("str 0",))]),
        ({"a.b": A, "a": {"b": B}}, [("a.b", ("str a.b",)), ("a.b", ("str a", "str b"))]),
        ({"a": [A, B], "a.1": A}, [("a.1", ("str a", " 1")), ("a.1", ("str a.1",))]),
        ({0: A, "0": A}, [("0", ("int 0",)), ("0", ("str 0",))]),
        ({0: A, "0": B, b"0": 5}, [("0", ("int 0",)), ("0", ("str 0",))]),
        ({"a.b": A, "a": {"b": B}, b"a": 5}, [("a.b", ("str a.b",)), ("a.b", ("str a", "str b"))]),
        ({"": {"": A}, ".": B}, [(".", ("str ", "str ")), (".", ("str .",))]),
        (circle(), [("0", ("int 0",)), ("0", ("str 0",))]),
        ({"n": 1, "m": A}, []),
    ],
)
def test_each_is_told_by_its_keys(tmp_path, value, expected):
    assert spelled(value, tmp_path) == expected


def test_what_hangs_on_a_tensor_has_no_key(tmp_path):
    parameter = torch.nn.Parameter(A.clone())
    parameter.extra = B
    found = dict(spelled({"p": parameter, "p.extra": torch.ones(4)}, tmp_path))
    assert found == {"p.extra": ("str p.extra",)}


def test_a_mark_that_is_no_storage_is_no_tensor():
    class Marking(pickle.Pickler):
        def persistent_id(self, obj):
            return ("module", "a") if obj is A else None

    stream = io.BytesIO()
    Marking(stream, 2).dump({"x": A})
    assert spellings(interpret(stream.getvalue(), Limits()).root, {"x"}, (), Budget(Limits(), 0)) == {}


def test_an_object_is_looked_at_once_for_each_name(tmp_path):
    held = argparse.Namespace(d={1: A, "1": B})
    for _ in range(40):
        held = argparse.Namespace(k={0: held, "0": held})
    ways = spelled({"r": held}, tmp_path, Limits(visits=1000))
    assert [told[-1] for _, told in ways] == ["int 1", "str 1"]
    assert {told[2:-1:2] for _, told in ways} == {("int 0",) * 40}


@pytest.mark.unmeasured
def test_ways_that_lead_nowhere_count(tmp_path):
    held = {}
    held[0] = held["0"] = held
    name = ".".join("0" * 40)
    with pytest.raises(LimitExceeded, match="paths through"):
        spelled({"r": held, f"r.{name}": A, f"r.{name}".encode(): B}, tmp_path)


def test_beginnings_of_a_name_that_is_nothing_but_dots_count(tmp_path):
    with pytest.raises(LimitExceeded, match="length"):
        spelled({"." * 20_000: A, b"." * 20_000: B}, tmp_path)
