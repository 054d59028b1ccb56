"""Overlap of the chunks of a tensor; the oracle compares every pair and every element."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import LimitExceeded
from ckptmove.formats import chunks as module
from ckptmove.formats.chunks import Chunk, flaw_of

AXIS = st.integers(0, 3)
BOXES = st.integers(1, 3).flatmap(
    lambda axes: st.lists(st.builds(Chunk, st.tuples(*[AXIS] * axes), st.tuples(*[AXIS] * axes)), max_size=6)
)


def elements(chunk):
    ranges = [range(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    return list(product(*ranges))


@given(BOXES)
def test_two_chunks_overlap_where_an_element_is_in_both(boxes):
    every = [element for chunk in boxes for element in elements(chunk)]
    shape = (6,) * (len(boxes[0].sizes) if boxes else 1)
    flaw, is_apart = flaw_of(shape, boxes), len(set(every)) == len(every)
    assert ("overlap" in flaw, not flaw) == (not is_apart, is_apart)


@pytest.mark.parametrize(
    ("chunk", "flaw"),
    [
        (Chunk((0, 0), (2, 3)), ""),
        (Chunk((1, 0), (2, 3)), "a chunk reaches past the end of"),
        (Chunk((0,), (2, 3)), "a chunk has another number of axes than"),
        (Chunk((0, 0), (2,)), "a chunk has another number of axes than"),
    ],
)
def test_a_chunk_lies_in_its_tensor(chunk, flaw):
    assert flaw_of((2, 3), [chunk]) == flaw


def test_a_tensor_without_axes_may_come_from_each_rank():
    assert flaw_of((), [Chunk((), ())] * 3) == ""


@pytest.mark.unmeasured
def test_a_grid_of_shards_is_no_work():
    grid = [Chunk((row, column), (1, 1)) for row in range(200) for column in range(50)]
    assert flaw_of((200, 50), grid) == ""


def test_the_work_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "_MOST_COMPARISONS", 100)
    rows, columns = [Chunk((row, 0), (1, 50)) for row in range(20)], [Chunk((20, at), (30, 1)) for at in range(20)]
    with pytest.raises(LimitExceeded, match="comparisons") as caught:
        flaw_of((50, 50), rows + columns)
    assert caught.value.limit == 100 < caught.value.actual
