"""Two places of one chunk or object in a ``.metadata``: the one that torch loads counts."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

import ckptmove
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.tensors.stored import StoredTensors


class Twice(dict):
    """A dict that is written with more items than it has, as no dict can be: the last of one key comes last."""

    def items(self):
        return [*self.first, *super().items()]


class Pickler(pickle._Pickler):
    """Pickles as a plain dict."""

    dispatch: ClassVar = {**pickle._Pickler.dispatch, Twice: pickle._Pickler.save_dict}


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.fixture(params=["the first", "the second"])
def folder(distributed, tmp_path, request):
    """A tensor and an object that are written twice, the places of the one or of the other listed last."""
    one = {"w": (torch.full((2,), 1.0), [(0, (0,), (2,))])}
    folder = distributed.save_ranks(tmp_path / "run", one, {"o": (0, saved("value 1"))})
    other = distributed.save_ranks(
        tmp_path / "other", {"w": (torch.full((2,), 2.0), [(1, (0,), (2,))])}, {"o": (1, saved("value 2"))}
    )
    (folder / "__1_0.distcp").write_bytes((other / "__1_0.distcp").read_bytes())
    metadata = distributed.metadata_of(folder)
    places = [distributed.metadata_of(folder).storage_data, distributed.metadata_of(other).storage_data]
    if request.param == "the first":
        places.reverse()
    metadata.storage_data = Twice(places[1])
    # Other objects: one that is the same is written once.
    metadata.storage_data.first = [(MetadataIndex(key.fqn, key.offset), replace(one)) for key, one in places[0].items()]
    buffer = io.BytesIO()
    Pickler(buffer, 4).dump(metadata)
    (folder / ".metadata").write_bytes(buffer.getvalue())
    return folder


def test_what_torch_loads_counts(distributed, folder):
    assert ckptmove.inspect(folder, check=True).inventory.facts == ()  # both files are named in it
    wanted = {"w": torch.zeros(2), "o": ""}
    distributed.load(wanted, folder)
    number = int(wanted["w"][0])
    assert (number in {1, 2}, wanted["o"]) == (True, f"value {number}")
    with open_checkpoint(str(folder), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        (part,), (record,) = checkpoint.parts, checkpoint.inventory.tensors
        assert torch.equal(stored.tensor(record), wanted["w"])
        assert part.tree().get("o") == wanted["o"]
        pieces = [*part.pieces("w"), *(placed for _, placed, _ in part.objects())]
    assert [placed.file for placed in pieces] == [f"__{number - 1}_0.distcp"] * 2
