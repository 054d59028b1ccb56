"""Values of a tree that only the reader of its pickle has."""

import pickle

import pytest

from ckptmove.checkpoint.opening import open_checkpoint
from ckptmove.limits import Limits


@pytest.mark.parametrize(("key", "has_rng"), [(b"rng_state", True), (b"unknown_x", False)])
def test_an_extension_code_at_the_key_of_an_rng_state_counts_as_one(tmp_path, key, has_rng):
    path = tmp_path / "run.pkl"
    path.write_bytes(b"\x80\x02}" + pickle.BINUNICODE + len(key).to_bytes(4, "little") + key + pickle.EXT1 + b"\x01s.")
    with open_checkpoint(str(path), Limits()) as checkpoint:
        assert ("rng" in checkpoint.inventory.contents) is has_rng
