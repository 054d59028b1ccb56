"""The values of a checkpoint by their names in the state of a case."""

from __future__ import annotations

import pytest
import torch

from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.training.mesh.stored import Slice, StoredState


@pytest.fixture
def read(monkeypatch):
    """Byte counts of the reads."""
    counts = []
    read_extent = StoredTensors._read_extent

    def counted(self, place, record):
        counts.append(place.span.nbytes)
        return read_extent(self, place, record)

    monkeypatch.setattr(StoredTensors, "_read_extent", counted)
    return counts


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize(("first", "numel"), [(0, 60), (7, 13), (60, 0)])
def test_only_the_slice_of_a_flattened_tensor_is_read(tmp_path, read, is_contiguous, first, numel):
    whole = torch.arange(60.0).reshape(6, 10)
    torch.save({"w": whole if is_contiguous else whole.t().contiguous().t()}, tmp_path / "w.pth")
    with open_checkpoint(str(tmp_path / "w.pth"), keep_trees=True) as checkpoint, StoredState(checkpoint, {"w"}) as own:
        found = own.region("w", Slice(first, numel, (6, 10)))
    assert torch.equal(found, torch.arange(float(first), float(first + numel)))
    assert read == [numel * 4 if is_contiguous else 240]
