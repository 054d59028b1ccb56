"""Shards of a Hugging Face model and their index, compared with examples of the documentation."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.conversion.shards import parse_size, shard_index, shard_names, split_shards
from ckptmove.errors import UsageError
from ckptmove.formats.safetensors_new import NewTensor
from ckptmove.io.contracts import BytesSegment


def tensors_of(sizes):
    return [NewTensor(f"w{index}", "uint8", (size,), (BytesSegment(bytes(size)),)) for index, size in enumerate(sizes)]


def sizes_of(shards):
    return [[tensor.nbytes for tensor in shard] for shard in shards]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        # The first is the example in the docstring of huggingface_hub's split_torch_state_dict_into_shards, the next
        # two have the sizes of its tests.
        ([6, 6, 2, 6, 2, 2], 10, [[6], [6, 2], [6, 2, 2]]),
        ([6, 10, 30, 2, 2], 100, [[6, 10, 30, 2, 2]]),
        ([6, 10, 30, 2, 2], 10, [[6], [30], [10], [2, 2]]),
        ([30], 10, [[30]]),
        ([], 10, [[]]),
        ([0, 10, 0], 10, [[0, 10, 0]]),
    ],
)
def test_tensors_are_split_in_their_order(sizes, limit, expected) -> None:
    assert sizes_of(split_shards(tensors_of(sizes), limit)) == expected


@given(st.lists(st.integers(0, 20)), st.integers(1, 15))
def test_each_tensor_is_in_one_shard_and_only_single_tensors_exceed_the_size(sizes, limit) -> None:
    tensors = tensors_of(sizes)
    shards = split_shards(tensors, limit)
    assert sorted(tensor.name for shard in shards for tensor in shard) == sorted(tensor.name for tensor in tensors)
    assert all(len(shard) == 1 or sum(tensor.nbytes for tensor in shard) <= limit for shard in shards)


def test_names_of_files() -> None:
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(3)[0] == "model-00001-of-00003.safetensors"
    assert shard_names(3)[-1] == "model-00003-of-00003.safetensors"


def test_the_index() -> None:
    first, second = tensors_of([2, 3])
    text = shard_index([[first], [second]], {"tied": "w0"})
    assert text.endswith(b"\n}\n")
    assert json.loads(text) == {
        "metadata": {"tied": "w0", "total_size": 5},
        "weight_map": {"w0": "model-00001-of-00002.safetensors", "w1": "model-00002-of-00002.safetensors"},
    }


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("0.3MB", 300_000),
        (" 1 kb ", 1000),
        ("2GiB", 2 << 30),
        ("1TB", 10**12),
        ("1.5KiB", 1536),
        ("16G", 16 * 10**9),
    ],
)
def test_sizes(text, nbytes) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "5", "GB", "5XB", "-5GB", "0GB", "0.0001KB", "1e3GB", "nanGB", "5GiBs", "\u0665GB"]
)
def test_texts_that_are_not_sizes(text) -> None:
    with pytest.raises(UsageError):
        parse_size(text)
