"""Objects of the standard library and of numpy become plain values. The oracles are Python and numpy."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import math
import pathlib
import pickle
import random
import struct
import uuid
from typing import NamedTuple

import numpy as np
import pytest
from plain_files import loaded, plain, saved

from ckptmove.conversion.remap.errors import NotPlain
from ckptmove.conversion.remap.plain import make_plain
from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.tree import Call, Dict, Global, List, Tuple

torch = pytest.importorskip("torch")

ZONE = dt.timezone(-dt.timedelta(hours=3, minutes=30))
NOW = dt.datetime(2024, 2, 29, 13, 5, 7, 90, tzinfo=dt.timezone.utc)
IDENTITY = uuid.UUID(int=2**127 + 5)


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Bits(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Text(str):
    __slots__ = ()


class Items(list):
    pass


class Table(dict):
    pass


class Point(NamedTuple):
    x: int
    y: int


def function() -> None:
    pass


class Owner:
    def method(self) -> None:
        pass


def name_of(value: object) -> str:
    return f"{value.__module__}.{value.__qualname__}"


VALUES = [
    (pathlib.PurePosixPath("/data/run 1"), "/data/run 1"),
    (pathlib.PurePosixPath("data/run"), "data/run"),
    (pathlib.PurePosixPath(), "."),
    (pathlib.PureWindowsPath("C:\\data\\run"), "C:\\data\\run"),
    (IDENTITY, str(IDENTITY)),
    (range(2, 11, 3), [2, 5, 8]),
    (slice(None, 3), (None, 3, None)),
    (type(None), "builtins.NoneType"),
    (frozenset({7}), [7]),
    (frozenset(), []),
    (collections.deque([1, 2], 5), [1, 2]),
    (collections.deque(), []),
    (collections.defaultdict(list, a=[1]), {"a": [1]}),
    (collections.defaultdict(list), {}),
    (functools.partial(function, 1), name_of(function)),
    (functools.partial(functools.partial(Owner().method)), name_of(Owner.method)),
    (dict.fromkeys, "builtins.dict.fromkeys"),
    (function, name_of(function)),
    (Owner, name_of(Owner)),
    (NOW, NOW.isoformat()),
    (NOW.replace(tzinfo=ZONE, microsecond=0), NOW.replace(tzinfo=ZONE, microsecond=0).isoformat()),
    (NOW.replace(tzinfo=None), NOW.replace(tzinfo=None).isoformat()),
    (NOW.date(), NOW.date().isoformat()),
    (NOW.time(), NOW.time().isoformat()),
    (dt.timedelta(days=-1, microseconds=1), dt.timedelta(days=-1, microseconds=1).total_seconds()),
    (decimal.Decimal("1.50"), "1.50"),
    (fractions.Fraction(1, 3), "1/3"),
    (torch.torch_version.TorchVersion("2.4.0"), "2.4.0"),
    (Color.RED, "red"),
    (Color.PAIR, (1, 2)),
    (Bits.LOW | Bits.HIGH, 3),
    (Text("word"), "word"),
    (Items([1, 2]), [1, 2]),
    (Table(a=1), {"a": 1}),
    (Point(1, 2), (1, 2)),
]
ARRAYS = [
    np.arange(6, dtype="i4"), np.arange(6, dtype=">i8").reshape(2, 3),
    np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    np.array(2.5), np.array([True, False]), np.zeros(0), np.array([1.5, math.inf], dtype="f2"),
    np.array(["a", "", "Grün"]), np.array(["ab"], dtype=">U2"), np.array([[1, "two"], [None, 4.0]], dtype=object),
]  # fmt: skip
SCALARS = [np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("Grün")]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(("value", "expected"), VALUES, ids=lambda value: type(value).__name__)
def test_objects_of_python(value, expected, protocol) -> None:
    found = loaded(saved({"value": [value]}, protocol))
    assert found.value == {"value": [expected]}
    assert type(found.value["value"][0]) is type(expected)
    (replaced,) = found.replaced
    assert (replaced.where, replaced.target) == ("value.0", type(expected).__name__)


@pytest.mark.parametrize("value", [Color.RED, Text("a"), Items([1]), Table(a=1), Point(1, 2), Bits.LOW])
def test_objects_in_protocol_0(value) -> None:
    expected = {Color.RED: "red", Text("a"): "a", Point(1, 2): (1, 2), Bits.LOW: 1}
    assert plain([value], 0) == [expected[value] if isinstance(value, collections.abc.Hashable) else value]


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_arrays(array, protocol) -> None:
    assert plain(array, protocol) == array.tolist()


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda scalar: type(scalar).__name__)
def test_scalars_of_numpy(scalar) -> None:
    (value,) = plain([scalar])
    assert value == scalar.item()
    assert type(value) is type(scalar.item())


def test_states_of_generators() -> None:
    random.seed(0)
    legacy = np.random.RandomState(0).get_state()
    states = {"python": random.getstate(), "numpy": legacy}
    found = plain(states)
    assert found["python"] == states["python"]
    again = np.random.RandomState(1)
    again.set_state(found["numpy"])
    assert again.random_sample() == np.random.RandomState(0).random_sample()


@pytest.mark.parametrize("made", [np.random.RandomState(3), np.random.default_rng(3), np.random.PCG64(3)])
def test_generators_of_numpy(made) -> None:
    found = loaded(saved([made]))
    state = made.get_state(legacy=False) if isinstance(made, np.random.RandomState) else None
    state = state or getattr(made, "bit_generator", made).state
    (value,) = found.value
    assert value["bit_generator"] == state["bit_generator"]
    assert dict(value["state"]) == {
        key: item.tolist() if isinstance(item, np.ndarray) else item for key, item in state["state"].items()
    }
    assert [(replaced.where, replaced.target) for replaced in found.replaced if "." not in replaced.where] == [
        ("0", "dict")
    ]


def test_a_dtype_of_numpy_can_be_made_again() -> None:
    assert np.dtype(plain(np.dtype(">f4"))) == np.dtype(">f4")
    assert np.dtype(plain(np.dtype("bool"))) == np.dtype("bool")


def call(name: str, *args: object, state: object = None) -> Call:
    module, _, attribute = name.rpartition(".")
    made = Call(Global(module, attribute), Tuple(args, (-1,) * len(args)), -1)  # type: ignore[arg-type]  # any values
    made.state = state  # type: ignore[assignment]  # any value
    return made


def pairs(**values: object) -> Dict:
    flat = [item for pair in values.items() for item in pair]
    return Dict(flat, [-1] * len(flat))  # type: ignore[arg-type]  # any values


FLOATS = call("numpy.dtype", "f4", state=Tuple((3, "<"), (-1, -1)))
ANY = call("library.compute", 1)


def test_arrays_of_python_2_and_of_dill() -> None:
    raw = struct.pack("<2f", 1, 2)
    state = Tuple((1, Tuple((2,), (-1,)), FLOATS, False, raw), (-1,) * 5)
    root, _ = make_plain(call("dill._dill._create_array", None, None, state, None), Limits())
    assert root.items == [1.0, 2.0]
    # The pickle of Python 2 has bytes as text.
    ascii_only = Tuple((1, Tuple((1,), (-1,)), FLOATS, False, "\0\0\0@"), (-1,) * 5)
    root, _ = make_plain(call("numpy.core.multiarray._reconstruct", state=ascii_only), Limits())
    assert root.items == [2.0]
    data = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01K\x01\x85cnumpy\ndtype\nU\x02f4\x85R"
    data += b"\x89U\x04\0\0\x80?tb."
    root, _ = make_plain(interpret(data, Limits()).root, Limits())
    assert root.items == [1.0]
    assert make_plain(call("dill._dill._load_type", "int"), Limits())[0] == "int"


def test_an_array_without_values() -> None:
    state = Tuple((1, Tuple((2**60, 0), (-1, -1)), FLOATS, True, b""), (-1,) * 5)
    root, _ = make_plain(call("numpy.core.multiarray._reconstruct", state=state), Limits())
    assert root.items == []


def test_a_fraction_of_an_old_python() -> None:
    assert make_plain(call("fractions.Fraction", "1/3"), Limits())[0] == "1/3"


REFUSED = [
    np.zeros(100_001), np.zeros((2, 50_001)), np.array(["2024-01-01"], dtype="M8[D]"), np.array([1 + 2j]),
    np.ma.array([1], mask=[True]), np.datetime64("2024-01-01"), range(100_001),
    call("pathlib.PosixPath", 1), call("uuid.UUID"), call("fractions.Fraction"),
    call("uuid.UUID", state=pairs(int=-1)), call("builtins.range", 1), call("builtins.range", 0, 10**40, 1),
    call("fractions.Fraction", 10**5000, 1), call("datetime.timedelta", 0, 0, 10**5000),
    call("numpy.core.multiarray._reconstruct",
         state=Tuple((1, Tuple((2**62,) * 300, (-1,) * 300), FLOATS, False, b""), (-1,) * 5)),
    call("numpy.core.multiarray.scalar", FLOATS, ANY),
    call("builtins.type", 1), call("builtins.frozenset", 1), call("functools.partial"), call("functools.partial", 1),
    call("builtins.getattr", Global("library", "Class")), call("functools.partial", Call(None, None, -1)),
    call("datetime.date"), call("datetime.date", b"123"), call("datetime.date", b"1234", 5),
    call("datetime.time", b"123456", ANY), call("datetime.time", b"123456", call("datetime.timezone", 1)),
    call("datetime.time", b"123456", call("datetime.timezone", call("datetime.timedelta", 0, 1, 0))),
    call("datetime.timedelta", 1), call("datetime.timedelta", 10**9, 0, 0), call("dill._dill._load_type"),
    call("dill._dill._create_array"), call("numpy.core.multiarray._reconstruct"),
    call("numpy.core.multiarray._reconstruct", state=Tuple((1, 2, FLOATS, False, b""), (-1,) * 5)),
    call("numpy.core.multiarray._reconstruct", state=Tuple((1, Tuple((1,), (-1,)), FLOATS, False, b""), (-1,) * 5)),
    call("numpy.core.multiarray._reconstruct",
         state=Tuple((1, Tuple((1,), (-1,)), call("numpy.dtype", "U1"), False, b"\xff" * 4), (-1,) * 5)),
    call("numpy.dtype"), call("numpy.core.multiarray.scalar"), call("numpy.random._pickle.__generator_ctor"),
]  # fmt: skip


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: getattr(value, "name", type(value).__name__))
def test_values_without_a_plain_form(value) -> None:
    root = List([value], [-1]) if isinstance(value, Call) else interpret(pickle.dumps([value], 2), Limits()).root
    with pytest.raises(NotPlain) as refused:
        make_plain(root, Limits())
    ((where, name, why),) = refused.value.objects
    assert where == "0"
    assert name
    assert why in str(refused.value)
