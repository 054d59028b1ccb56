"""Values of a tree that only the reader of its pickle has."""

import pickle

import pytest

from ckptmove.checkpoint.inventory.shapes import unique
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.tree import Dict


@pytest.mark.parametrize(("key", "has_rng"), [(b"rng_state", True), (b"unknown_x", False)])
def test_an_extension_code_at_the_key_of_an_rng_state_counts_as_one(tmp_path, key, has_rng):
    path = tmp_path / "run.pkl"
    path.write_bytes(b"\x80\x02}" + pickle.BINUNICODE + len(key).to_bytes(4, "little") + key + pickle.EXT1 + b"\x01s.")
    with open_checkpoint(str(path), Limits()) as checkpoint:
        assert ("rng" in checkpoint.inventory.contents) is has_rng


def test_a_number_that_is_a_key_twice_is_one_key() -> None:
    pairs = Dict([2, "a", 1, "b", 2, "c"], [0, 1, 2, 3, 4, 5])
    assert [*unique(pairs)] == [(2, "c", 5), (1, "b", 3)]
    assert [*unique(Dict([2, "a", 1, "b"], [0, 1, 2, 3]))] == [(2, "a", 1), (1, "b", 3)]
