"""Random expressions of lazy tensors, each compared with the same expression of torch."""

from __future__ import annotations

import sys
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.io import cast as io_cast
from ckptmove.lazy import cast, chunked, strided
from ckptmove.lazy import stored as stored_module
from ckptmove.lazy import tensor as tensor_module
from ckptmove.lazy.cast import Cast
from ckptmove.lazy.chunked import Chunked, joined
from ckptmove.lazy.geometry import extent_numel
from ckptmove.lazy.stored import StoredBytes, Strided, as_strided, bytes_of_storage, stored_tensor
from ckptmove.lazy.tensor import Elements, blocks
from ckptmove.lazy.views import flat, permuted, reshaped, sliced, stacked
from ckptmove.model import Span, TensorRecord
from ckptmove.torch_facts.dtypes import CASTABLE_FLOATS, COMPLEX_PARTS, ITEM_BYTES

OTHER = {"little": "big", "big": "little"}[sys.byteorder]
DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "bcomplex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip
#: Dtypes of the same size that every operation of torch supports: expressions of torch have these.
TWINS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@pytest.fixture(autouse=True, scope="module")
def _small():
    """Limits in proportion to tensors of a few hundred bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_module, "BLOCK_ELEMENTS", 8)
        patch.setattr(tensor_module, "_SWAPPED", 32)
        for module in (stored_module, chunked, cast):
            patch.setattr(module, "TILE", 128)
        patch.setattr(io_cast, "CAST_BLOCK", 32)
        patch.setattr(chunked, "_MOST_LOADED", 2)
        patch.setattr(strided, "_CHUNK", 48)
        patch.setattr(strided, "_GAP", 4)
        yield


class Reads:
    """A source that only reads what it has; every second one reads into memory."""

    def __init__(self, data, *, into):
        self.data = data
        if into:
            self.read_into = self._read_into

    def read(self, start, end):
        assert 0 <= start < end <= len(self.data)
        return self.data[start:end]

    def _read_into(self, start, memory):
        memory[:] = self.read(start, start + len(memory))


def raw(values, dtype, byteorder=sys.byteorder):
    """The elements of a torch tensor in order."""
    data = values.numpy().tobytes()
    if byteorder != sys.byteorder:
        word = ITEM_BYTES[dtype] // (2 if "complex" in dtype else 1)
        data = b"".join(data[at : at + word][::-1] for at in range(0, len(data), word))
    return data


def storage_of(draw, values, dtype):
    """The bytes of a torch storage in a file, after bytes of something else."""
    byteorder, before = draw(st.sampled_from([sys.byteorder, OTHER])), draw(st.integers(0, 3))
    data = bytes(before) + raw(values, dtype, byteorder)
    return StoredBytes(Reads(data, into=draw(st.booleans())), Span(before, len(data)), byteorder)


def random_values(draw, count, dtype):
    """Elements of a dtype, as its twin. Some are too large for smaller dtypes."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    if dtype in CASTABLE_FLOATS or dtype in COMPLEX_PARTS:
        real = torch.float64 if dtype not in COMPLEX_PARTS else torch.complex128
        values = torch.randn(count, generator=seed, dtype=real) * draw(st.sampled_from([1e-6, 1, 1e3, 1e5, 1e39]))
        return values.to(getattr(torch, dtype)).view(TWINS[ITEM_BYTES[dtype]])
    data = torch.randint(0, 256, (count * ITEM_BYTES[dtype],), generator=seed, dtype=torch.uint8)
    return data.view(TWINS[ITEM_BYTES[dtype]])


@st.composite
def stored(draw, dtype, shape=None):
    """A view with any strides, or any bytes of a given shape."""
    shape = draw(SHAPES) if shape is None else shape
    stride, offset = tuple(draw(st.integers(0, 12)) for _ in shape), draw(st.integers(0, 4))
    values = random_values(draw, offset + extent_numel(shape, stride), dtype)
    lazy = Strided(storage_of(draw, values, dtype), dtype, shape, stride, offset)
    return lazy, values.as_strided(shape, stride, offset)


def put(draw, values, dtype):
    """A torch tensor in a storage, with its axes in any order and with gaps."""
    order = draw(st.permutations(range(values.dim())))
    stride, step = [0] * values.dim(), draw(st.integers(1, 3))
    for axis in order:
        stride[axis], step = step, step * max(values.shape[axis], 1) + draw(st.integers(0, 2))
    shape = tuple(values.shape)
    holder = torch.zeros(extent_numel(shape, stride), dtype=values.dtype)
    holder.as_strided(shape, stride).copy_(values)
    return Strided(storage_of(draw, holder, dtype), dtype, shape, tuple(stride))


def cuts(draw, offsets, sizes, most):
    """Boxes that cover a box, none of them empty."""
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    if not axes or most == 0 or not draw(st.booleans()):
        return [(offsets, sizes)]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, sizes[axis] - 1))
    first, second = list(sizes), list(sizes)
    first[axis], second[axis] = at, sizes[axis] - at
    begin = tuple(offset + at if one == axis else offset for one, offset in enumerate(offsets))
    return cuts(draw, offsets, tuple(first), most - 1) + cuts(draw, begin, tuple(second), most - 1)


@st.composite
def in_chunks(draw, dtype):
    shape = draw(SHAPES)
    values = random_values(draw, prod(shape), dtype).view(shape)
    boxes = draw(st.permutations(cuts(draw, (0,) * len(shape), shape, 4))) if 0 not in shape else []
    parts = [put(draw, values[tuple(slice(a, a + b) for a, b in zip(*box, strict=True))], dtype) for box in boxes]
    return Chunked(shape, dtype, boxes, parts.__getitem__), values


@st.composite
def expressions(draw, dtype=None, depth=4):  # noqa: PLR0911  # a return for each operation
    """A lazy tensor, and the tensor of torch with the same elements as its twin."""
    dtype = dtype or draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["view", "chunks", "permute", "slice", "reshape", "flat", "cat", "stack", "cast"]))
    if depth == 0 or kind == "view":
        return draw(stored(dtype))
    if kind == "chunks":
        return draw(in_chunks(dtype))
    if kind == "cast":
        same = next((group for group in (CASTABLE_FLOATS, COMPLEX_PARTS) if dtype in group), ())
        inner = draw(st.sampled_from(sorted({*same} - {dtype}) or [dtype]))
        lazy, values = draw(expressions(inner, depth - 1))
        if inner == dtype:
            return lazy, values
        found = values.clone(memory_format=torch.contiguous_format).view(-1).view(getattr(torch, inner))
        found = found.to(getattr(torch, dtype))
        return Cast(lazy, dtype), found.view(TWINS[ITEM_BYTES[dtype]]).view(values.shape)
    lazy, values = draw(expressions(dtype, depth - 1))
    if kind == "permute":
        axes = draw(st.permutations(range(values.dim())))
        return permuted(lazy, axes), values.permute(axes)
    if kind == "slice":
        begins = [draw(st.integers(0, size)) for size in values.shape]
        sizes = [draw(st.integers(0, size - at)) for size, at in zip(values.shape, begins, strict=True)]
        return sliced(lazy, begins, sizes), values[tuple(slice(a, a + b) for a, b in zip(begins, sizes, strict=True))]
    if kind == "reshape":
        shape = draw(st.permutations([*factors(values.numel()), 1]))
        return reshaped(lazy, shape), values.reshape(shape)
    if kind == "flat":
        first = draw(st.integers(0, values.numel()))
        count = draw(st.none() | st.integers(0, values.numel() - first))
        return flat(lazy, first, count), values.flatten()[first:][:count]
    others = draw(st.lists(stored(dtype, tuple(values.shape)), max_size=2))
    lazies, tensors = zip((lazy, values), *others, strict=True)
    if kind == "cat" and values.dim():
        axis = draw(st.integers(0, values.dim() - 1))
        return joined(lazies, axis), torch.cat([one.contiguous() for one in tensors], axis)
    axis = draw(st.integers(0, values.dim()))
    return stacked(lazies, axis), torch.stack(tensors, axis)


def factors(number):
    """Prime factors of a small number."""
    for factor in range(2, number):
        if number % factor == 0:
            return [factor, *factors(number // factor)]
    return [number]


@given(made=expressions(), data=st.data())
def test_elements_are_those_of_torch(made, data) -> None:
    lazy, values = made
    expected = raw(values, lazy.dtype)
    assert lazy.shape == tuple(values.shape)
    assert lazy.nbytes == len(expected)
    found = [bytes(block) for block in blocks(lazy)]
    assert b"".join(found) == expected
    assert {len(block) for block in found[:-1]} <= {8 * lazy.item}
    assert b"".join(map(bytes, blocks(lazy, OTHER))) == raw(values, lazy.dtype, OTHER)
    if expected:
        first = data.draw(st.integers(0, lazy.numel - 1))
        last = data.draw(st.integers(first + 1, lazy.numel))
        assert (
            Elements(lazy).read(first * lazy.item, last * lazy.item) == expected[first * lazy.item : last * lazy.item]
        )


def held(values, byteorder=sys.byteorder):
    """A strided tensor as it is in memory."""
    data = bytes(values.untyped_storage())
    if byteorder != sys.byteorder:
        data = b"".join(data[at : at + 4][::-1] for at in range(0, len(data), 4))
    storage = StoredBytes(Reads(data, into=False), Span(0, len(data)), byteorder)
    return Strided(storage, "float32", tuple(values.shape), values.stride(), values.storage_offset())


GRID = torch.arange(24.0).view(4, 6)
BOXES = [((0, 3), (4, 3)), ((2, 0), (2, 3)), ((0, 0), (2, 3))]
PARTS = [held(GRID[a : a + m, b : b + n].clone()) for (a, b), (m, n) in BOXES]
#: A tensor of each kind of node, and the same of torch.
NODES = {
    "strided": (held(GRID, OTHER), GRID),
    "turned": (held(GRID.t()), GRID.t()),
    "chunked": (Chunked((4, 6), "float32", BOXES, PARTS.__getitem__), GRID),
    "cast": (Cast(held(GRID), "float64"), GRID.double()),
    "flat": (reshaped(held(GRID.t()), (3, 8)), GRID.t().reshape(3, 8)),
}
OPERATIONS = {
    "permuted": lambda lazy, values: (permuted(lazy, (1, 0)), values.t()),
    "sliced": lambda lazy, values: (sliced(lazy, (1, 2), (2, 2)), values[1:3, 2:4]),
    "reshaped": lambda lazy, values: (reshaped(lazy, (2, 3, 4)), values.reshape(2, 3, 4)),
    "flat": lambda lazy, values: (flat(lazy, 5, 9), values.reshape(-1)[5:14]),
    "all flat": lambda lazy, values: (flat(lazy), values.reshape(-1)),
    "joined": lambda lazy, values: (joined([lazy, lazy], 1), torch.cat([values, values], 1)),
    "stacked": lambda lazy, values: (stacked([lazy, lazy], 1), torch.stack([values, values], 1)),
}


@pytest.mark.parametrize("node", NODES)
def test_each_operation_on_each_node(node) -> None:
    for name, operation in OPERATIONS.items():
        lazy, values = operation(*NODES[node])
        expected = raw(values, lazy.dtype)
        assert (lazy.shape, b"".join(map(bytes, blocks(lazy)))) == (tuple(values.shape), expected), name
        for at in range(lazy.numel):  # each element of each chunk on its own
            assert Elements(lazy).read(at * lazy.item, (at + 1) * lazy.item) == expected[at * lazy.item :][: lazy.item]


def test_the_elements_of_a_tensor_can_be_a_storage_of_a_tensor() -> None:
    lazy = NODES["chunked"][0]
    assert bytes_of_storage(as_strided(lazy).storage) is lazy
    swapped = StoredBytes(Elements(lazy, OTHER), Span(0, 96), OTHER)
    assert b"".join(map(bytes, blocks(bytes_of_storage(swapped)))) == raw(GRID, "float32", OTHER)
    record = TensorRecord("w", "model", "cpu", "float32", (4, 6), (6, 1), "0", 0, 96)
    assert stored_tensor(as_strided(lazy).storage, record) is lazy
    assert b"".join(map(bytes, blocks(stored_tensor(swapped, record)))) == raw(GRID, "float32")
    for changes in ({"shape": (6, 4), "stride": (1, 6)}, {"dtype": "int32"}):
        assert isinstance(stored_tensor(swapped, record._replace(**changes)), Strided)
    for storage in (swapped, as_strided(lazy).storage):
        assert stored_tensor(storage, record._replace(storage_offset=1)) is None
