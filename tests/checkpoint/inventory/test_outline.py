"""The outline of a tree."""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict

import pytest
import torch

from ckptmove.checkpoint.inventory.outline import outline
from ckptmove.errors import LimitExceeded
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.machine import interpret


@pytest.fixture
def lines_of(tmp_path):
    def lines(obj):
        path = tmp_path / "saved.pt"
        torch.save(obj, path)
        with open_checkpoint(str(path)) as checkpoint:
            return [
                (line.depth, line.name, line.description) for line in outline(checkpoint.file.tree(), Limits(), 1000)
            ]

    return lines


class Thing:
    def __reduce__(self):
        return Thing, (1, torch.device("cpu"))


class Empty:
    def __reduce__(self):
        return Empty, ()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_an_outline(lines_of):
    saved = {
        "w": torch.ones(4, 3), "sparse": torch.eye(2).to_sparse(), "o": OrderedDict(a=1e-3), "n": Namespace(lr=0.1),
        "list": list(range(10)), "few": (1, "a"), "none": [], "nested": [{"x": None}], "set": {1},
        "d": torch.device("mps"),
        "long": "x" * 100, "big": 1 << 400, "dtype": torch.float16, "storage": torch.FloatStorage(2), "thing": Thing(),
        "bytes": b"ab", "empty": Empty(),
    }  # fmt: skip
    name = Thing.__module__
    assert lines_of(saved) == [
        (0, "", "dict (17)"),
        (1, "w", "float32 [4, 3] cpu"),
        (1, "sparse", "float32 [2, 2] cpu sparse_coo"),
        (1, "o", "OrderedDict (1)"),
        (2, "a", "0.001"),
        (1, "n", "argparse.Namespace"),
        (2, "lr", "0.1"),
        (1, "list", "list (10): 0, 1, 2, 3, 4, 5, 6, 7, …"),
        (1, "few", "tuple (2): 1, 'a'"),
        (1, "none", "list (0)"),
        (1, "nested", "list (1)"),
        (2, "0", "dict (1)"),
        (3, "x", "None"),
        (1, "set", "__builtin__.set(…)"),
        (2, "0", "list (1): 1"),
        (1, "d", "torch.device(mps)"),
        (1, "long", f"'{'x' * 60}'…"),
        (1, "big", "an integer of 401 bits"),
        (1, "dtype", "torch.float16"),
        (1, "storage", "storage float32 [2] cpu"),
        (1, "thing", f"{name}.Thing(…)"),
        (2, "0", "1"),
        (2, "1", "torch.device(cpu)"),
        (1, "bytes", "_codecs.encode(…)"),
        (2, "0", "'ab'"),
        (2, "1", "'latin1'"),
        (1, "empty", f"{name}.Empty()"),
    ]


@pytest.mark.parametrize(
    ("body", "description"),
    [
        (b"NQ", "persistent id"),
        (b"(K\x01\x91", "set (1): 1"),
        (b"\x82\x07", "copyreg extension 7"),
        (b"N)R", "object()"),
        (b"N}b", "object"),
    ],
)
def test_odd_nodes(body, description):
    (line, *_) = outline(interpret(b"\x80\x04" + body + b".", Limits()).root, Limits(), 1000)
    assert line.description == description


def test_a_cycle_ends():
    lines = outline(interpret(b"\x80\x02]q\x00h\x00a.", Limits()).root, Limits(), 1000)
    assert [line.depth for line in lines] == [0, 1]


def test_a_bomb_is_refused():
    body = b"]q\x00" + b"".join(b"0](h%ch%ceq%c" % (level, level, level + 1) for level in range(30))
    root = interpret(b"\x80\x02" + body + b".", Limits()).root
    with pytest.raises(LimitExceeded):
        outline(root, Limits(visits=10_000), 10**6)


def test_depth_is_refused():
    root = interpret(b"\x80\x02" + b"]" * 300 + b"a" * 299 + b".", Limits()).root
    with pytest.raises(LimitExceeded):
        outline(root, Limits(depth=100), 10**6)
