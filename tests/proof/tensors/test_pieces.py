from __future__ import annotations

import pytest
import torch

from ckptmove.limits import Limits
from ckptmove.model import TensorRecord
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.step.recipe import make_noise
from ckptmove.proof.step.step import noise_like
from ckptmove.proof.tensors import stored as state
from ckptmove.proof.tensors.pieces import (
    WINDOW_ELEMENTS,
    WITHOUT_STATE,
    ParameterPiece,
    SelectedParameters,
    Window,
    batches,
)
from ckptmove.proof.tensors.stored import StoredTensors

READ = StoredTensors._read_file
RECORD = TensorRecord("w", "model", "cpu", "float32", (2, 3), (3, 1), "0", 0, 24)


def piece(elements=6, offset=0):
    return ParameterPiece("w", 0, RECORD, True, None, None, elements, offset)


def test_small_pieces_are_stepped_together_and_large_ones_alone():
    pieces = [piece()] * 600 + [piece(WINDOW_ELEMENTS)] * 2 + [piece()]
    sizes = [len(batch) for batch in batches(iter(pieces), together=False)]
    assert [len(batch) for batch in batches(iter(pieces), together=True)] == [603]
    assert sizes == [512, 88, 1, 1, 1]
    assert list(batches(iter(()), together=False)) == []


def test_an_optimizer_is_given_few_groups_at_once():
    pieces = [piece()._replace(group=index // 2) for index in range(150)]
    assert [len(batch) for batch in batches(iter(pieces), together=False)] == [64, 64, 22]
    assert [len(batch) for batch in batches(iter(pieces), together=True)] == [150]


def test_the_gradient_of_a_window_is_the_window_of_the_gradient():
    noise = make_noise(0)
    whole = noise_like(torch.empty(300_000), piece(300_000), noise, 1.0)
    part = noise_like(torch.empty(100), piece(100, offset=250_000), noise, 1.0)
    assert torch.equal(whole[250_000:250_100], part)
    assert whole.abs().min() >= 0.5
    assert whole.abs().max() <= 1.5


def test_the_gradient_follows_the_seed_and_the_scale():
    one = noise_like(torch.empty(9), piece(), make_noise(0), 1.0)
    assert not torch.equal(one, noise_like(torch.empty(9), piece(), make_noise(1), 1.0))
    assert torch.equal(one / 4, noise_like(torch.empty(9), piece(), make_noise(0), 0.25))


def test_a_gradient_larger_than_the_noise():
    size = 3_000_000
    values = noise_like(torch.empty(size), piece(size), make_noise(0), 1.0)
    assert values.numel() == size
    assert torch.equal(values[:65_537], values[65_537 : 2 * 65_537])


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "rows"])
@pytest.mark.parametrize("order", ["contiguous", "transposed"])
def test_a_window_is_read_as_it_is_cut(make, flat, order):
    values = torch.arange(300_000.0).reshape(600, 500)
    values = values if order == "contiguous" else values.t()
    path = make.save({"w": values})
    window = Window(100, 400, flat)
    with open_checkpoint(path, Limits()) as checkpoint:
        (found,) = checkpoint.inventory.tensors
        for keeps in (True, False):
            with StoredTensors(checkpoint.parts, keeps=keeps) as stored:
                assert torch.equal(stored.tensor(found, window), window.cut(values))
                assert torch.equal(stored.tensor(found, window), window.cut(stored.tensor(found)))


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "rows"])
@pytest.mark.parametrize("order", ["contiguous", "transposed", "narrow"])
def test_the_bytes_of_a_tensor_are_read_once_for_all_its_windows(make, monkeypatch, flat, order):
    monkeypatch.setattr(state, "_KEPT_BYTES", 0)
    wide = torch.arange(60_000.0)
    values = {
        "contiguous": wide.reshape(300, 200),
        "transposed": wide.reshape(200, 300).t(),
        "narrow": wide.reshape(300, 200)[:, :50],
    }[order]
    path = make.save({"w": values, "m": values * 2})
    read = []
    monkeypatch.setattr(
        StoredTensors,
        "_read_file",
        lambda self, disk, span, buffer: read.append(span.nbytes) or READ(self, disk, span, buffer),
    )
    step = 10 * (values.shape[1] if flat else 1)
    rows = values.numel() if flat else 300
    with (
        open_checkpoint(path, Limits()) as checkpoint,
        StoredTensors(checkpoint.parts, mapped=False, keeps=True) as stored,
    ):
        for start in range(0, rows, step):
            window = Window(start, start + step, flat)
            for found, one in zip(checkpoint.inventory.tensors, (values, values * 2), strict=True):
                assert torch.equal(stored.tensor(found, window), window.cut(one))
    assert sum(read) <= 2 * wide.nbytes


def test_a_weight_that_its_library_freezes_is_not_missed():
    found = SelectedParameters([], {})
    for name in ("0.dfl.conv.weight", "0.conv.weight"):
        found.leave_out(name, WITHOUT_STATE)
        found.leave_out(name, "another reason")
    assert found.left_out == {
        WITHOUT_STATE: ["0.conv.weight"],
        "another reason": ["0.dfl.conv.weight", "0.conv.weight"],
    }
