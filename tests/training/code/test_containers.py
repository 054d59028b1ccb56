"""Suggested expressions that move a container: all its tensors are moved, and nothing else changes."""

from __future__ import annotations

import ast
import dataclasses
import enum
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.training.code.containers import Move, assignment, attributes_of, has_to, moved, ways

MOVE = Move("double()", "torch")


class Pair(NamedTuple):
    x: object
    y: object


class Part(enum.Enum):
    X = 1
    Y = 2


class Batch:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Batch(self.x.to(device))


class InPlace(Batch):
    def to(self, device):
        self.x = self.x.to(device)


@dataclasses.dataclass
class Fields:
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


def one(number=1.0):
    return torch.tensor([number])


class Settings(dict):
    """The attributes are the items, as many scripts have it: a missing one is a KeyError."""

    __getattr__ = dict.__getitem__


def test_attributes_of_an_object_are_not_computed():
    class Slots:
        __slots__ = ("x",)

        def __getattr__(self, name):
            raise KeyError(name)

    assert attributes_of(Settings(x=one())) == {}
    assert attributes_of(Slots()) == {}
    assert [*attributes_of(Batch(1))] == ["x"]
    assert [way for way, _ in ways("s", Settings(x=1))] == ["s", "s['x']"]


LEAVES = st.one_of(st.builds(one), st.integers(), st.text(max_size=2), st.none())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


def same(left, right):
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and right.dtype == torch.float64 and torch.equal(left.double(), right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return left == right


@given(VALUES)
def test_an_expression_moves_every_tensor_and_nothing_else(value):
    text = moved("batch", value, MOVE)
    if text:
        assert same(value, eval(text, {"torch": torch, "batch": value}))
    elif any(isinstance(part, torch.Tensor) for _, part in ways("batch", value)):
        ast.parse(repr([key for key, _ in ways("", value)]))  # too deep, or too many kinds of entries
        assert max(way.count("[") + way.count(".") for way, _ in ways("", value)) > 2 or len(value) > 6


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (one(), "b.to(v)"),
        ([one(), one()], "[one.to(v) for one in b]"),
        ((one(), one()), "tuple(one.to(v) for one in b)"),
        ({"x": one()}, "{key: value.to(v) for key, value in b.items()}"),
        (
            [{"x": one(), "y": 1}],
            "[{key: value.to(v) if T.is_tensor(value) else value for key, value in one.items()} for one in b]",
        ),
        (([one()], {"y": one()}), "([one.to(v) for one in b[0]], {key: value.to(v) for key, value in b[1].items()})"),
        ({"x": one(), "y": [one()]}, "{**b, 'x': b['x'].to(v), 'y': [one.to(v) for one in b['y']]}"),
        (Pair(one(), 1), "b._replace(x=b.x.to(v))"),
        (Batch(one()), "b.to(v)"),
        ([Batch(one()), None], "[b[0].to(v), b[1]]"),
        ([1, "a"], ""),
        (Pair(1, 2), ""),
        ({Part.X: one(), Part.Y: [one()]}, ""),
        ([[one()], *[one()] * 6], ""),
        ([[[[one()]]]], ""),
    ],
)  # fmt: skip
def test_an_expression_is_one_that_people_write(value, text):
    assert moved("b", value, Move("to(v)", "T")) == text


def test_without_a_name_for_torch_a_tensor_is_told_by_its_method():
    assert moved("b", [one(), 1], Move("cpu()", "")) == '[one.cpu() if hasattr(one, "to") else one for one in b]'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fields(one(), "a"), "b.x = b.x.cpu()"),
        (SimpleNamespace(x=one(), y=[one()]), "b.x, b.y = b.x.cpu(), [one.cpu() for one in b.y]"),
        (SimpleNamespace(), ""),
        (Frozen(one()), ""),
        ([one()], "b = [one.cpu() for one in b]"),
        (1, ""),
    ],
)
def test_a_statement_moves_a_variable(value, text):
    assert assignment("b", value, Move("cpu()", "torch")) == text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Batch(one()), True),
        (InPlace(one()), False),
        (torch.nn.utils.rnn.pack_sequence([one()]), True),
        (one(), False),
        (torch.nn.Linear(1, 1), False),
        (Batch, False),
        (1, False),
    ],
)
def test_an_object_is_moved_by_its_method_if_that_returns_it(value, expected):
    assert has_to(value) is expected


def test_a_cycle_ends_and_a_dataset_is_not_searched():
    value = [one()]
    value.append(value)
    assert [way for way, _ in ways("b", value)] == ["b", "b[0]", "b[1]"]
    assert moved("b", value, MOVE) == ""
    assert len(list(ways("b", [one()] * 1001))) == 1
