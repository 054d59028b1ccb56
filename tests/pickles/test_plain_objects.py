"""Objects that are read in one step equal those that are read operation by operation."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import DamagedPickle, LimitExceeded
from ckptmove.limits import Limits
from ckptmove.pickles import plain_objects
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.plain_objects import interpret_objects
from ckptmove.pickles.tree import Call, Dict, Global, Node, PlainObject, nodes, tuple_items

LIMITS = Limits()


@dataclass
class Place:
    file: Any = None
    start: Any = None
    nbytes: Any = None


@dataclass(frozen=True)
class Two:
    offsets: Any = field(default_factory=torch.Size)
    sizes: Any = field(default_factory=torch.Size)


@dataclass
class One:
    value: Any = None


CLASSES = frozenset({f"{__name__}.{kind.__name__}" for kind in (Place, Two, One)})


def spelled(value):
    """The content of a tree, independent of how its objects are read."""
    if isinstance(value, PlainObject):
        pairs = zip(value.kind.fields, value.values, strict=True)
        return value.kind.name, {name: spelled(one) for name, one in pairs}
    if isinstance(value, Call) and value.name == "torch.Size":
        return spelled(value.arguments[0])
    if isinstance(value, Call):
        return value.name, spelled(value.state)
    if isinstance(value, Dict):
        return {spelled(key): spelled(one) for key, one, _ in value.pairs()}
    if isinstance(value, Global):
        return value.full_name
    return (type(value).__name__, *map(spelled, value.members())) if isinstance(value, Node) else value


def read(data, limits=LIMITS):
    """The machine, and the number of objects that it read in one step."""
    machine = interpret_objects(data, limits, CLASSES)
    return machine, sum(isinstance(node, PlainObject) for node in nodes(machine.root))


PLAIN = st.one_of(
    st.none(),
    st.sampled_from([0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**62, -1, -(2**31), -(2**40)]),
    st.sampled_from(["", "__0_0.distcp", "layers.0.weight", "a" * 255]),
    st.lists(st.integers(0, 2**33), max_size=3).map(torch.Size),
)
OTHER = st.sampled_from([1.5, True, "é", "a" * 256, [1], (1, 2), 2**70, torch.Size([1, 2, 3, 4]), b"x", {}])


@given(st.lists(st.builds(Place, PLAIN, PLAIN, PLAIN) | st.builds(Two, PLAIN, PLAIN), min_size=1), st.data())
def test_plain_objects_are_read_in_one_step(objects, data):
    shared = data.draw(st.lists(st.sampled_from(objects), max_size=2))
    saved = pickle.dumps([objects, {one.__class__.__name__: one for one in shared}, "end"], 4)
    machine, count = read(saved)
    assert spelled(machine.root) == spelled(interpret(saved, LIMITS).root)
    # An object that is named again is read operation by operation, and so is the first that names a class: of three.
    assert shared or count or len(objects) <= 3


@given(st.lists(st.builds(Place, PLAIN | OTHER, OTHER, PLAIN) | st.builds(Two, OTHER, PLAIN | OTHER), max_size=4))
def test_other_objects_are_read_operation_by_operation(objects):
    for protocol in (2, 4):
        saved = pickle.dumps(objects, protocol)
        machine, count = read(saved)
        assert not count or len(objects) > 1  # the second object reads its text from the memo
        assert spelled(machine.root) == spelled(interpret(saved, LIMITS).root)


def test_equal_objects_and_sizes_are_one_node():
    saved = pickle.dumps([Two(torch.Size([n % 2, 0]), torch.Size([2, 3])) for n in range(20)], 4)
    machine, count = read(saved)
    assert count <= 4
    assert spelled(machine.root) == spelled(interpret(saved, LIMITS).root)


def test_few_nodes_are_kept_to_be_used_again(monkeypatch):
    monkeypatch.setattr(plain_objects, "_MOST_KNOWN", 3)
    saved = pickle.dumps([Place(f"__{n % 5}.distcp", n, 300 * n) for n in range(50)], 4)
    machine, count = read(saved)
    assert count > 40
    assert spelled(machine.root) == spelled(interpret(saved, LIMITS).root)


def test_a_class_of_one_field_is_read_operation_by_operation():
    assert read(pickle.dumps([One(1), One(2)], 4))[1] == 0


#: After a list of the two strings 'a' (memo 1) and 'b' (memo 2), a tuple (1,) (memo 3), a list (memo 4), the class
#: Place (memo 5), and builtins.list (memo 6).
BEGIN = (
    b"\x80\x04]\x94(\x8c\x01a\x94\x8c\x01b\x94K\x01\x85\x94]\x94"
    + f"c{__name__}\nPlace\n".encode()
    + b"\x94cbuiltins\nlist\n\x94"
)
PLACE = b"h\x05)\x81\x94}\x94("


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"h\x01K\x01h\x02K\x02", 1),
        (b"h\x01h\x03h\x02K\x02", 1),
        (b"h\x01K\x01h\x01K\x02", 0),  # one field twice
        (b"h\x03K\x01h\x02K\x02", 0),  # a field whose name is not a string
        (b"h\x01h\x04h\x02K\x02", 0),  # a list, which may change
        (b"h\x01\x8c\x01\x02\x94h\x02K\x02", 1),
        (b"h\x01h\x06K\x01\x85\x94\x85\x94R\x94h\x02K\x02", 0),  # a call of another function
    ],
)
def test_only_plain_values_are_read_in_one_step(body, count):
    saved = BEGIN + PLACE + body + b"ube."
    machine, found = read(saved)
    assert found == count
    assert spelled(machine.root) == spelled(interpret(saved, LIMITS).root)


@pytest.mark.parametrize("index", [7, 8])
def test_an_object_that_is_read_again_is_read_operation_by_operation(index):
    """The dict of the fields changes after BUILD, as in Python."""
    saved = BEGIN + PLACE + b"h\x01K\x01h\x02K\x02ubh" + bytes([index]) + b"e."
    machine, found = read(saved)
    assert found == 0
    assert spelled(machine.root) == spelled(interpret(saved, LIMITS).root)


@pytest.mark.parametrize(
    "data",
    [
        b")",
        b"(h\x00t.",
        BEGIN + PLACE + b"h\x01K\x01h\x77K\x02ube.",  # an index that was never set
        BEGIN + PLACE + b"h\x01\x8c\x09x\x94h\x02K\x02ube.",  # a string that is longer than its text
        BEGIN + PLACE + b"h\x01K\x01h\x02K\x02ube",
    ],
)
def test_damage_is_that_of_the_operations(data):
    with pytest.raises(DamagedPickle) as expected:
        interpret(data, LIMITS)
    with pytest.raises(DamagedPickle) as raised:
        read(data)
    assert (raised.value.detail, raised.value.offset) == (expected.value.detail, expected.value.offset)


def test_items_for_an_object_are_read_operation_by_operation():
    saved = BEGIN + PLACE + b"h\x01K\x01h\x02K\x02ub(h\x01K\x01ue."
    machine, found = read(saved)
    assert found == 0
    assert spelled(machine.root) == spelled(interpret(saved, LIMITS).root)


def test_the_limits_are_those_of_the_operations():
    saved = pickle.dumps([Place("a", n, n) for n in range(100)], 4)
    with pytest.raises(LimitExceeded):
        read(saved, LIMITS._replace(pickle_bytes=len(saved) - 1))
    with pytest.raises(LimitExceeded):
        read(saved, LIMITS._replace(operations=20))


def test_fields_are_found_by_name():
    place = next(
        node
        for node in nodes(read(pickle.dumps([Place(), Place("a", 1, 2)], 4))[0].root)
        if isinstance(node, PlainObject)
    )
    assert (place.get("file"), place.get("nbytes"), place.get("none")) == ("a", 2, None)


def test_sizes_are_tuples_of_their_numbers():
    machine, _ = read(pickle.dumps([Two(), Two(torch.Size([2**40, 1]), torch.Size(()))], 4))
    two = next(node for node in nodes(machine.root) if isinstance(node, PlainObject))
    assert [tuple_items(one) for one in two.values] == [(2**40, 1), ()]
