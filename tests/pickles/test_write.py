from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from object_graphs import PICKLES, Plain, dumped, graphs

from ckptmove.errors import UneditablePickle
from ckptmove.limits import Limits
from ckptmove.pickles import write
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import WEIGHTS_ONLY_OPCODES, operations
from ckptmove.pickles.tree import Call, Dict, Global, List, Node, Persistent, Tuple, nodes
from ckptmove.pickles.write import write_pickle

if TYPE_CHECKING:
    from ckptmove.pickles.tree import Value

torch = pytest.importorskip("torch")

LIMITS = Limits()
SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


def rewritten(data: bytes, limits: Limits = LIMITS) -> bytes:
    return write_pickle(interpret(data, limits).root)


def protocol_of(data: bytes) -> int:
    return data[1]


def described(value: Value) -> tuple[object, ...]:
    """Everything of a value except its members."""
    if isinstance(value, Global):
        return Global, value.module, value.name
    if isinstance(value, Call):
        return Call, value.opcode, value.state_start >= 0
    return (type(value), len(value.members())) if isinstance(value, Node) else (type(value), repr(value))


def has_identity(value: Value) -> bool:
    """Whether it matters that two references are to one object; Python shares short strings itself."""
    if isinstance(value, Node):
        return not isinstance(value, Global) and not (isinstance(value, Tuple) and not value.items)
    return isinstance(value, str | bytes) and len(value) > 1


def is_isomorphic(left: Value, right: Value) -> bool:
    """Whether two trees are equal, and share the same nodes, strings and bytes."""
    partner: dict[int, Value] = {}
    back: dict[int, Value] = {}
    todo = [(left, right)]
    while todo:
        one, other = todo.pop()
        if described(one) != described(other):
            return False
        if has_identity(one):
            if id(one) in partner or id(other) in back:
                if partner.get(id(one)) is not other or back.get(id(other)) is not one:
                    return False
                continue
            partner[id(one)], back[id(other)] = other, one
        if isinstance(one, Node):
            todo += zip(one.members(), other.members(), strict=True)
    return True


def copies_itself(tree: Value) -> bool:
    """Whether a call copies a container that holds its own result: the copy depends on the order of the operations."""
    calls = [node for node in nodes(tree) if isinstance(node, Call)]
    return any(
        call in nodes(one)
        for call in calls
        for one in call.arguments
        if isinstance(one, Node) and type(one) is not Tuple
    )


@given(value=graphs(), **PICKLES)
def test_pickle_loads_the_same_objects(value, protocol, style, same):
    data = dumped(value, protocol, style)
    assume(not copies_itself(interpret(data, LIMITS).root))
    written = rewritten(data)
    assert same(pickle.loads(written), pickle.loads(data))
    assert 2 <= protocol_of(written) <= max(protocol, 2)


@pytest.mark.unmeasured
@given(value=graphs(), **PICKLES)
def test_the_written_pickle_has_the_same_tree(value, protocol, style):
    tree = interpret(dumped(value, protocol, style), LIMITS).root
    written = write_pickle(tree)
    again = interpret(written, LIMITS).root
    assert is_isomorphic(tree, again)
    assert write_pickle(again) == written


LOOP: Any = []
LOOP.append((LOOP, "text", frozenset([1]), LOOP))
PAIR: Any = [[], []]
PAIR[0] += [tuple(PAIR)] * 2
PAIR[1] += [tuple(PAIR), PAIR[0][0]]
HOLDER = Plain()
HOLDER.inner = ({"self": HOLDER}, [HOLDER])
WIDE = [0, 1, 2, 3, "a tuple of more than three items"]
WIDE.append((*WIDE, WIDE))


class Called:
    """Its argument contains the object itself."""

    def __init__(self, holder):
        self.holder = holder

    def __reduce__(self):
        return Called, (self.holder,)


def called() -> Called:
    holder: list[Any] = []
    holder.append(Called(holder))
    return holder[0]


VALUES = {
    "a list in a tuple in the list": LOOP,
    "that tuple": LOOP[0],
    "tuples that contain themselves twice": PAIR[0][0],
    "an object in its attributes": HOLDER,
    "a tuple above a mark": WIDE[-1],
    "an object in its arguments": called(),
    "more indices than one byte": [[[number]] * 2 for number in range(300)],
    "batches of a list": [None] * 2001,
    "batches of a dict": dict.fromkeys(range(2001)),
    "batches of a set": {*range(2001)},
    "batches of a subclass": OrderedDict.fromkeys(map(str, range(2001))),
    "an empty set": set(),
    "integers": [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**2039, -(2**2048), 2**9000],
    "long bytes": [b"x" * 256, bytearray(300)],
    "strings": ["", "\ud800", "é" * 200, "a\nb"],
    "a nested class": Fraction.from_float,
}


@pytest.mark.unmeasured
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", VALUES)
def test_cycles_batches_and_widths(name, protocol, same):
    data = pickle.dumps(VALUES[name], protocol)
    written = rewritten(data)
    assert same(pickle.loads(written), pickle.loads(data))
    assert is_isomorphic(interpret(data, LIMITS).root, interpret(written, LIMITS).root)


@pytest.mark.parametrize(
    ("source", "protocol"),
    [
        (pickle.dumps({"a": [1.5, "b", (None, True)]}, 5), 2),
        (pickle.dumps(2**9000, 5), 2),
        (pickle.dumps(b"raw", 5), 3),
        (pickle.dumps({1}, 5), 4),
        (pickle.dumps(frozenset(), 5), 4),
        (pickle.dumps(Fraction.from_float, 5), 2),
        (b"\x80\x04\x8c\x0bcollections\x8c\x08deque.no\x93.", 4),
        (b"\x80\x04\x8c\x01a\x8c\x11b\x0acos\x0asystem\x0a(U\x01x\x93.", 4),
        (pickle.dumps(bytearray(b"raw"), 5), 5),
    ],
)
def test_the_protocol_is_the_lowest_that_holds_the_values(source, protocol):
    written = rewritten(source)
    assert protocol_of(written) == max(protocol, 2)
    assert is_isomorphic(interpret(source, LIMITS).root, interpret(written, LIMITS).root)


@pytest.mark.parametrize("encoding", ["utf-8", "latin1", "bytes"])
@pytest.mark.parametrize("size", [1, 300])
def test_strings_of_python2_that_are_not_ascii_keep_their_bytes(encoding, size):
    text = "é".encode() * size
    source = b"(T" + len(text).to_bytes(4, "little") + text + b"q\x00h\x00t."
    written = rewritten(source)
    assert pickle.loads(written, encoding=encoding) == pickle.loads(source, encoding=encoding)
    assert is_isomorphic(interpret(source, LIMITS).root, interpret(written, LIMITS).root)


def test_bytes_of_python2_that_are_not_utf8_are_kept():
    assert pickle.loads(rewritten(b"U\x02\xff0."), encoding="latin1") == "\xff0"


BY_HAND = {
    "OBJ without arguments": b"(ccollections\nOrderedDict\no.",
    "INST with arguments": b"((lI1\naicollections\ndeque\n.",
    "a shared INST": b"((lI1\naicollections\ndeque\nq\x000(h\x00h\x00t.",
    "a function as OBJ": b"(cbuiltins\nlen\n]o.",
    "equal globals": b"(ccollections\ndeque\nccollections\ndeque\nt.",
    "BUILD with None": b"ccollections\nOrderedDict\n)RNb.",
    "an item": b"ccollections\ndeque\n)RK\x01a.",
    "a key twice": b"}(K\x01K\x02K\x01K\x03u.",
    "empty tuples": b"((tq\x00h\x00)t.",
    "duplicate": b"]2\x86.",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_pickles_by_hand(name):
    source = BY_HAND[name]
    written = rewritten(source)
    assert is_isomorphic(interpret(source, LIMITS).root, interpret(written, LIMITS).root)
    if name != "BUILD with None":
        assert pickle.loads(written) == pickle.loads(source)


def test_a_frozenset_of_an_object_with_that_frozenset():
    owner = Plain()
    owner.inner = frozenset([owner])
    written = rewritten(pickle.dumps(owner.inner, 4))
    loaded = pickle.loads(written)
    assert [one.inner is loaded for one in loaded] == [True]
    assert protocol_of(written) == 4


def test_no_items_are_no_operation():
    assert rewritten(b"ccollections\ndeque\n)R(e(u.") == b"\x80\x02ccollections\ndeque\n)R."


def test_an_object_in_its_own_obj_arguments(same):
    # L = []; an OBJ of Called with (L,); L.append(it): the call is written inside its own arguments.
    source = b"]q\x000(c" + Called.__module__.encode() + b"\nCalled\nh\x00oq\x010h\x00h\x01a0h\x01."
    assert same(pickle.loads(rewritten(source)), pickle.loads(source))


def test_keyword_arguments_of_a_call_in_its_own_arguments():
    source = b"]q\x000ca\nb\nh\x00\x85}\x92q\x010h\x00h\x01a0h\x01."
    tree = interpret(source, LIMITS).root
    assert is_isomorphic(tree, interpret(write_pickle(tree), LIMITS).root)


def test_a_state_without_a_place_is_written():
    call = Call(Global("collections", "OrderedDict"), Tuple((), ()), -1)
    call.state = Dict(["name", 1], [-1, -1])
    assert vars(pickle.loads(write_pickle(call))) == {"name": 1}


class _Identified(pickle.Pickler):
    def persistent_id(self, value):
        return ("storage", str(value)) if isinstance(value, Fraction) else None


class _Resolved(pickle.Unpickler):
    def persistent_load(self, pid):
        return pid


@pytest.mark.parametrize("protocol", range(1, 6))
def test_persistent_ids_are_kept(protocol):
    out = io.BytesIO()
    number = Fraction(1, 3)
    _Identified(out, protocol).dump([number, number, {"n": number}])
    written = rewritten(out.getvalue())
    loaded = [_Resolved(io.BytesIO(data)).load() for data in (out.getvalue(), written)]
    assert loaded[0] == loaded[1] == [("storage", "1/3"), ("storage", "1/3"), {"n": ("storage", "1/3")}]


def test_persistent_ids_of_protocol_0_and_in_cycles():
    assert _Resolved(io.BytesIO(rewritten(b"(Pkey\nl."))).load() == ["key"]
    loop = Persistent(List([], []), -1)
    loop.pid.items += [loop, loop]
    assert is_isomorphic(loop, interpret(write_pickle(loop), LIMITS).root)


@pytest.mark.parametrize(
    "source",
    [
        b"\x80\x02\x82\x01.",
        b"\x80\x05\x97.",
        b"ca\nb\n)RK\x01bK\x02b.",
        b"]K\x01b.",
        b"\x80\x04ca\nb\n)RX\x01\x00\x00\x00c\x93.",
    ],
    ids=["extension code", "buffer", "second BUILD", "BUILD of a list", "computed name"],
)
def test_values_that_only_the_reader_has_are_refused(source):
    with pytest.raises(UneditablePickle):
        rewritten(source)


def entangled(count: int) -> Value:
    """A tuple of lists; each contains the tuple."""
    lists = [List([], []) for _ in range(count)]
    root = Tuple(tuple(lists), (0,) * count)
    for one in lists:
        one.items.append(root)
    return root


def test_cycles_through_a_tuple_are_limited(monkeypatch):
    monkeypatch.setattr(write, "_MOST_REPEATED", 60 * 60)
    tree = entangled(60)
    assert is_isomorphic(tree, interpret(write_pickle(tree), LIMITS).root)
    with pytest.raises(UneditablePickle):
        write_pickle(entangled(62))


DEPTH = 25_000
DEEP = {
    "lists": b"]" * DEPTH + b"a" * (DEPTH - 1),
    "tuples": b")" + b"\x85" * DEPTH,
    "dicts": b"}" + b"K\x01}" * DEPTH + b"s" * DEPTH,
    "calls": b"ca\nb\nq\x00)R" + b"h\x00)R" * DEPTH + b"b" * DEPTH,
    "persistent ids": b"K\x01" + b"Q" * DEPTH,
}


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting_is_written_without_recursion(name):
    source = b"\x80\x02" + DEEP[name] + b"."
    assert rewritten(source, Limits(depth=2 * DEPTH)) == source


def split_file(data: bytes, count: int) -> tuple[bytes, bytes, bytes]:
    """Bytes before, of and after the pickle that follows ``count`` others."""
    bounds = [0]
    for _ in range(count + 1):
        *_, (_, end, _) = operations(data, bounds[-1])
        bounds.append(end)
    return data[: bounds[-2]], data[bounds[-2] : bounds[-1]], data[bounds[-1] :]


def with_rewritten_pickle(data: bytes) -> tuple[bytes, bytes, bytes]:
    """A checkpoint with a rewritten object pickle, the pickle before, and after."""
    if not data.startswith(b"PK"):
        is_legacy = data.startswith(b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.")
        before, source, after = split_file(data, 3 if is_legacy else 0)
        written = rewritten(source)
        return before + written + after, source, written
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as new:
        for info in archive.infolist():
            record = archive.read(info)
            if info.filename.endswith("/data.pkl"):
                source, record = record, rewritten(record)
                written = record
            new.writestr(info.filename, record)
    return out.getvalue(), source, written


def saved_again(value: object) -> dict[str, bytes]:
    """The records of ``torch.save``: they show values, types, strides and sharing."""
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        return {
            info.filename: archive.read(info) for info in archive.infolist() if "serialization_id" not in info.filename
        }


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SAMPLES.rglob("*.*")) if path.suffix in {".pt", ".pth", ".ckpt", ".bin"}
     and path.name not in {"script-code-cuda0.pt", "without-crcs.pth"}],
    ids=lambda path: path.name,
)  # fmt: skip
def test_torch_loads_the_same_from_every_sample(path):
    before = path.read_bytes()
    after, source, written = with_rewritten_pickle(before)
    loads = []
    for weights_only in (True, False):
        try:
            expected = torch.load(io.BytesIO(before), map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError:
            assert weights_only
            with pytest.raises(pickle.UnpicklingError):
                torch.load(io.BytesIO(after), map_location="cpu", weights_only=True)
            continue
        found = torch.load(io.BytesIO(after), map_location="cpu", weights_only=weights_only)
        loads.append(saved_again(found) == saved_again(expected))
    assert loads
    assert all(loads)
    assert len(written) <= len(source)
    assert protocol_of(written) == 2
    assert {code for _, _, code in operations(written)} <= WEIGHTS_ONLY_OPCODES


def test_only_values_that_are_read_again_are_memoised():
    shared = ["shared"]
    written = rewritten(pickle.dumps([shared, shared, "once", ("once more",)], 2))
    names = [opcode.name for opcode, _, _ in pickletools.genops(written)]
    assert names.count("BINPUT") == names.count("BINGET") == 1
