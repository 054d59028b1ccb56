"""Names that read alike, told apart by the keys that spell them."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

from ckptmove.checkpoint import open_checkpoint
from ckptmove.inventory.spellings import spellings
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret

A, B = torch.ones(2), torch.zeros(3)


def spelled(value, folder):
    """The spellings of the tensors whose names read alike, in the order of the file."""
    torch.save(value, folder / "x.pt")
    with open_checkpoint(str(folder / "x.pt")) as checkpoint:
        tensors = checkpoint.inventory.tensors
        names = [tensor.name for tensor in tensors]
        alike = [tensor for tensor in tensors if names.count(tensor.name) > 1]
        told = spellings(checkpoint.machine.root, {tensor.name for tensor in alike}, alike)
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
    assert spellings(interpret(stream.getvalue(), Limits()).root, {"x"}, ()) == {}
