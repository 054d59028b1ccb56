"""Casts, compared with torch's own ``Tensor.to``."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import DamagedArchive
from ckptmove.io.cast import CAST_BLOCK, cast_blocks, in_blocks
from ckptmove.io.contracts import BytesSegment, CastSegment
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of
from ckptmove.torch_facts.dtypes import CASTABLE_FLOATS, COMPLEX_PARTS, ITEM_BYTES

PAIRS = sorted(permutations(CASTABLE_FLOATS, 2))
#: Integers of the same size, for patterns of bits.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Older versions of torch give NaN for values that are too large for float8_e4m3fn.
SATURATES = bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float().isfinite())


def cast(data, source, target, byteorder="little", block_bytes=CAST_BLOCK, overflowed=None):
    blocks = (memoryview(data)[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    return b"".join(cast_blocks(blocks, source, target, byteorder, overflowed))


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def swap(data, item):
    return np.frombuffer(data, np.uint8).reshape(-1, item)[:, ::-1].tobytes()


def pattern(dtype, bits):
    return torch.tensor(bits, dtype=torch.int64).to(INTEGERS[ITEM_BYTES[dtype]]).view(getattr(torch, dtype))


def random_patterns(dtype, count, seed=0):
    data = np.random.default_rng(seed).bytes(count * ITEM_BYTES[dtype])
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))


def all_patterns(dtype):
    """Every pattern of a short dtype; random ones of a long dtype, half of them in the range of the short dtypes."""
    if ITEM_BYTES[dtype] <= 2:
        return pattern(dtype, range(256 ** ITEM_BYTES[dtype]))
    count, generator = 500_000, torch.Generator().manual_seed(1)
    numbers = torch.randint(-(2**15), 2**15, [count], generator=generator) / 2**12
    near = torch.ldexp(numbers, torch.randint(-30, 20, [count], generator=generator)).to(getattr(torch, dtype))
    wide = random_patterns(dtype, count)
    return torch.cat([wide, near, boundaries(dtype)])


def boundaries(dtype):
    """The numbers of every shorter dtype, the middles between neighbours, and the next numbers to both."""
    floats = [torch.tensor([0.0, float("inf"), float("nan"), 1.0, 0.1], dtype=getattr(torch, dtype))]
    for short in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        finite = pattern(short, range(256 ** ITEM_BYTES[short] // 2)).double()
        finite = finite[finite.isfinite()]
        ends = torch.tensor([2 * finite[-1], finite[1] / 2, finite[-1] + (finite[-1] - finite[-2]) / 2])
        floats += [torch.cat([finite, (finite[1:] + finite[:-1]) / 2, ends]).to(getattr(torch, dtype))]
    if dtype == "float64":
        singles = pattern("float32", [0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x7F7FFFFE, 0x7F7FFFFF]).double()
        floats += [singles, (singles[1:] + singles[:-1]) / 2, singles[-1:] * (1 + 2**-25), singles[-1:] * 2]
    exact = torch.cat(floats)
    middle = exact.view(INTEGERS[ITEM_BYTES[dtype]])
    near = torch.cat([middle, middle + 1, (middle - 1).clamp(min=0)]).view(exact.dtype)
    return torch.cat([near, -near])


def assert_same(after, values, source, target):
    """Equal bits; any NaN for a NaN, because torch's own depends on the instructions of the CPU."""
    expected = values.to(getattr(torch, target))
    found = torch.frombuffer(bytearray(after), dtype=expected.dtype)
    compared = torch.ones(len(values), dtype=torch.bool)
    if target == "float8_e4m3fn" and not SATURATES:
        compared = values.double().abs() <= 464
    nan = values.double().isnan()
    assert bool(found.double().isnan()[nan].all())
    integers = INTEGERS[expected.itemsize]
    differ = (found.view(integers) != expected.view(integers)) & ~nan & compared
    assert not differ.any(), (values[differ][:5], found[differ][:5], expected[differ][:5])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_casts_are_those_of_torch_in_both_byte_orders(source, target):
    values = all_patterns(source)
    after = cast(raw(values), source, target)
    assert_same(after, values, source, target)
    assert swap(cast(swap(raw(values), values.itemsize), source, target, "big"), ITEM_BYTES[target]) == after


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_finite_values_that_are_too_large_are_counted(source, target):
    values = all_patterns(source)
    numbers = values.double()
    if target == "float8_e4m3fn":
        lost = numbers.isfinite() & (numbers.float().abs() > 464)
    else:
        lost = numbers.isfinite() & ~values.to(getattr(torch, target)).double().isfinite()
    counts = []
    cast(raw(values), source, target, overflowed=counts.append)
    assert sum(counts) == int(lost.sum())
    assert 0 not in counts


@pytest.mark.parametrize("byteorder", ["little", "big"])
@pytest.mark.parametrize(("source", "target"), [*permutations(COMPLEX_PARTS, 2)])
def test_both_parts_of_complex_numbers_are_cast(source, target, byteorder):
    parts = all_patterns(COMPLEX_PARTS[source])
    values = torch.view_as_complex(parts[: len(parts) // 2 * 2].view(-1, 2))
    before, counts = raw(values), []
    if byteorder == "big":
        before = swap(before, values.itemsize // 2)
    after = cast(before, source, target, byteorder, overflowed=counts.append)
    if byteorder == "big":
        after = swap(after, ITEM_BYTES[target] // 2)
    wide, narrow = torch.view_as_real(values), torch.view_as_real(values.to(getattr(torch, target)))
    assert_same(after, wide.flatten(), COMPLEX_PARTS[source], COMPLEX_PARTS[target])
    assert sum(counts) == int((wide.isfinite() & ~narrow.isfinite()).sum())


@pytest.mark.parametrize(
    ("source", "target"), [("float64", "float16"), ("float32", "bfloat16"), ("float16", "float64")]
)
def test_the_size_of_blocks_does_not_matter(source, target):
    data = raw(random_patterns(source, 3 * CAST_BLOCK // ITEM_BYTES[source] + 5))
    assert cast(data, source, target) == cast(data, source, target, block_bytes=ITEM_BYTES[source] * 1001)


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16", "float8_e5m2"])
def test_no_value_of_the_target_changes_on_its_way_through_float64(target):
    values = all_patterns(target)
    values = values[~values.double().isnan()]
    assert cast(cast(raw(values), target, "float64"), "float64", target) == raw(values)


def test_nothing_becomes_nothing():
    assert cast(b"", "float64", "float32") == b""


@pytest.mark.parametrize(("dtype", "target", "nbytes"), [("float64", "float32", 12), ("complex128", "complex64", 24)])
def test_half_an_element_is_damage(dtype, target, nbytes):
    segment = CastSegment(BytesSegment(bytes(nbytes)), dtype, target, "little")
    with pytest.raises(DamagedArchive, match=rf": {nbytes} bytes .* {dtype} "):
        list(blocks_of(MemorySource("x.pt", b""), [segment]))


def test_every_block_holds_whole_elements():
    assert not [dtype for dtype in (*CASTABLE_FLOATS, *COMPLEX_PARTS) if CAST_BLOCK % ITEM_BYTES[dtype]]


def test_only_a_cast_imports_numpy():
    code = "import sys, ckptmove.io.cast; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.lists(st.binary(max_size=9)), st.integers(1, 7))
def test_blocks_have_one_length(pieces, nbytes) -> None:
    *blocks, last = [bytes(block) for block in in_blocks(pieces, nbytes)] or [b"\0"]
    assert all(len(block) == nbytes for block in blocks)
    assert 0 < len(last) <= nbytes
    assert b"".join([*blocks, last]) == (b"".join(pieces) or b"\0")
