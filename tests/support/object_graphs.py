"""Random objects to pickle: nested, shared and cyclic, of every kind that a pickler treats differently."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict, deque, namedtuple
from typing import Any

from hypothesis import strategies as st

Point = namedtuple("Point", "x y")  # noqa: PYI024  # old checkpoints contain the untyped one


class Plain:
    pass


class Slotted:
    __slots__ = ("left", "right")

    def __getstate__(self):
        return None, {"left": self.left, "right": self.right}


class Reduced:
    def __reduce__(self):
        return (Reduced, (), {"inner": getattr(self, "inner", None)})


class Items(list):
    pass


class Pairs(OrderedDict):
    pass


class Window(deque):
    pass


class Keyword:
    def __new__(cls, *, name="", size=0):
        self = super().__new__(cls)
        self.name, self.size = name, size
        return self

    def __getnewargs_ex__(self):
        return (), {"name": self.name, "size": self.size}


class Stateful:
    def __init__(self):
        self.held = None

    def __getstate__(self):
        return [self.held]

    def __setstate__(self, state):
        self.held = state[0]


TEXT = st.text(st.characters(exclude_categories=()), max_size=9) | st.sampled_from(
    ["", "cpu", "\ud800", "😀", "a\nb\\u0041"]
)
NUMBERS = (
    st.integers()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 255, 256, 65535, 65536, 2**31, -(2**31), 2**2100])
)
HASHABLE = st.none() | st.booleans() | NUMBERS | TEXT | st.binary(max_size=300)
ATOMS = HASHABLE | st.floats() | st.binary(max_size=9).map(bytearray) | st.complex_numbers(allow_nan=False)
GLOBALS = st.sampled_from([OrderedDict, deque, int, len, Plain, Point])


KINDS = ["list", "tuple", "dict", "set", "frozenset", "ordered", "deque", "items", "object"]


@st.composite
def graphs(draw) -> Any:
    """Objects with shared members and cycles."""
    made: list[Any] = [draw(ATOMS)]
    mutable: list[list[Any]] = []
    for _ in range(draw(st.integers(0, 8))):
        members = st.lists(ATOMS | st.sampled_from(made) | st.sampled_from(made) | GLOBALS, max_size=4)
        kind = draw(st.sampled_from(KINDS))
        made.append(_make(kind, draw(members), draw(st.lists(HASHABLE, min_size=4, max_size=4))))
        if type(made[-1]) is list:
            mutable.append(made[-1])
    for target in mutable:
        target.extend(draw(st.lists(st.sampled_from(made), max_size=2)))
    return made if draw(st.booleans()) else made[-1]


def _make(kind: str, members: list[Any], keys: list[Any]) -> Any:
    if kind in {"set", "frozenset"}:
        return {"set": set, "frozenset": frozenset}[kind](keys[: len(members)])
    if kind in {"dict", "ordered"}:
        return {"dict": dict, "ordered": Pairs}[kind](zip(keys, members, strict=False))
    if kind == "deque":
        return Window(members, maxlen=9)
    if kind == "object":
        return _instance(members)
    return {"list": list, "tuple": tuple, "items": Items}[kind](members)


def _instance(members: list[Any]) -> Any:
    if not members:
        return Keyword(name="n", size=3)
    made: Any = [Plain, Slotted, Reduced, Stateful][len(members) - 1]()
    if isinstance(made, Slotted):
        made.left, made.right = members
    elif isinstance(made, Stateful):
        made.held = members
    else:
        made.inner = members
    return Point(made, members[0])


def dumped(value: Any, protocol: int, style: str) -> bytes:
    if style == "python":
        out = io.BytesIO()
        pickle._Pickler(out, protocol).dump(value)
        return out.getvalue()
    data = pickle.dumps(value, protocol)
    return pickletools.optimize(data) if style == "optimized" else data


PICKLES = {"protocol": st.integers(0, 5), "style": st.sampled_from(["c", "python", "optimized"])}
