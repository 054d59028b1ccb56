from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.limits import Limits
from ckptmove.pickles.machine import interpret
from ckptmove.pickles.scan import PUTS, SHAPE_OF, STOP, WEIGHTS_ONLY_OPCODES, operations

torch = pytest.importorskip("torch")
weights_only_lists = pytest.importorskip("weights_only_lists")

CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=300)
    | st.just(OrderedDict),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner, max_size=5)
        | st.sets(st.text(), max_size=5)
    ),
    max_leaves=30,
)


def expected(data: bytes) -> list[tuple[int, int, int]]:
    found = [(position, ord(opcode.code)) for opcode, _, position in pickletools.genops(data)]
    ends = [*(position for position, _ in found[1:]), len(data)]
    return [(start, end, code) for (start, code), end in zip(found, ends, strict=True)]


def saved(value: object, *, legacy: bool = False, protocol: int = 2) -> list[bytes]:
    """The pickles of a file that torch saves."""
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=not legacy, pickle_protocol=protocol)
    if not legacy:
        archive = zipfile.ZipFile(out)
        return [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    data, start, pickles = out.getvalue(), 0, []
    for _ in range(5):
        *_, (_, end, _) = operations(data, start)
        pickles.append(data[start:end])
        start = end
    return pickles


@pytest.fixture(scope="module")
def checkpoint() -> object:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "module": model}


@given(value=VALUES, protocol=st.integers(0, 5), optimized=st.booleans())
def test_operations_agree_with_genops(value, protocol, optimized):
    data = pickle.dumps(value, protocol)
    data = pickletools.optimize(data) if optimized else data
    assert list(operations(data)) == expected(data)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("legacy", [False, True])
def test_operations_agree_with_genops_on_what_torch_saves(checkpoint, legacy, protocol):
    pickles = saved(checkpoint, legacy=legacy, protocol=protocol)
    assert len(pickles) == (5 if legacy else 1)
    for data in pickles:
        assert list(operations(data)) == expected(data)
        assert interpret(data, Limits()).end == len(data)


def test_operations_of_a_pickle_among_other_bytes():
    data = pickle.dumps(["cpu", {"cuda:0": (1, 2.5)}], 4)
    shifted = [(start + 7, end + 7, code) for start, end, code in expected(data)]
    assert list(operations(b"before." + data + b"after", 7)) == shifted


def argument_shape(opcode: pickletools.OpcodeInfo) -> int:
    argument = opcode.arg
    if argument is None:
        return 0
    if argument.n >= 0:
        return int(argument.n)
    counts = {pickletools.TAKEN_FROM_ARGUMENT1: -3, pickletools.TAKEN_FROM_ARGUMENT4: -4}
    counts |= {pickletools.TAKEN_FROM_ARGUMENT4U: -4, pickletools.TAKEN_FROM_ARGUMENT8U: -5}
    return counts.get(argument.n, -2 if argument.name == "stringnl_noescape_pair" else -1)


def test_the_shapes_are_those_of_pickletools():
    assert {ord(opcode.code): argument_shape(opcode) for opcode in pickletools.opcodes} == SHAPE_OF


def test_the_named_opcodes_are_those_of_pickletools():
    assert CODES["STOP"] == STOP
    assert {CODES[name] for name in CODES if "PUT" in name or name == "MEMOIZE"} == PUTS


def test_the_weights_only_opcodes_are_those_that_torch_knows():
    assert {CODES[name] for name in weights_only_lists.opcodes_here()} == WEIGHTS_ONLY_OPCODES


def test_what_torch_saves_has_no_foreign_opcode(checkpoint):
    (data,) = saved(checkpoint)
    assert interpret(data, Limits()).foreign == {}
    (data,) = saved(checkpoint, protocol=4)
    foreign = interpret(data, Limits()).foreign
    assert {CODES["FRAME"], CODES["MEMOIZE"], CODES["SHORT_BINUNICODE"], CODES["STACK_GLOBAL"]} <= foreign.keys()
    assert all(data[start] == code for code, start in foreign.items())
