"""Sizes of a case on one rank: those of a real training step, and peaks as torch's own trackers find them."""

from __future__ import annotations

import fit_cases
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckptmove.errors import CaseUnusable
from ckptmove.training.fit.fake_group import on_fake_rank
from ckptmove.training.fit.training import Training

fsdp2_mem_tracker = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
CPU = torch.device("cpu")
#: Sizes of allocations are multiples of 512 bytes, for each of some twenty storages.
ROUNDING = 20 * 512


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")


def nbytes(tensors):
    return sum(one.numel() * one.element_size() for one in tensors)


def test_a_model_that_is_not_sharded() -> None:
    case = fit_cases.whole(CPU)  # with values
    model = case.model
    case.criterion(model(case.batch[0]), case.batch[1]).backward()
    case.optimizer.step()
    with on_fake_rank(3, 8):
        training = Training(fit_cases.whole(CPU), CPU)
        training.run_batch()
        training.step()
        sizes = training.sizes()
    moments = [one for state in case.optimizer.state.values() for one in state.values() if one.dim()]
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    assert sizes == tuple(map(nbytes, (model.parameters(), gradients, moments, model.buffers())))
    assert sizes.total == sum(sizes)
    assert not training.is_sharded
    assert training.elements == sum(one.numel() for one in model.parameters())
    assert training.largest_parameter == 12 * 32 * 4


@pytest.mark.unmeasured
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_shards(ranks) -> None:
    """The rows of the first and of the last rank are those of ``torch.chunk``."""
    whole = dict(fit_cases.Net().named_parameters())
    for rank in {0, ranks - 1}:
        mine = {
            name: (one.detach().chunk(ranks)[rank : rank + 1] or (one.detach()[:0],))[0] for name, one in whole.items()
        }
        with on_fake_rank(rank, ranks):
            training = Training(fit_cases.sharded(CPU), CPU)
            training.run_batch()
            training.step()
            sizes = training.sizes()
        used = [one for name, one in mine.items() if not name.startswith(("frozen", "unused"))]
        moments = [one for name, one in mine.items() if not name.startswith("frozen")]  # get_state_dict makes all
        assert sizes.parameters == nbytes(mine.values())
        assert sizes.gradients == nbytes(used)
        assert sizes.optimizer == 2 * nbytes(moments)


@pytest.mark.slow
def test_a_mesh_of_two_dimensions() -> None:
    with on_fake_rank(0, 8):
        training = Training(fit_cases.in_two_ways(CPU), CPU)
        training.run_batch()
        shapes = {
            name: tuple(one.to_local().shape) for name, one in fit_cases.in_two_ways(CPU).model.named_parameters()
        }
    assert shapes["up.weight"] == (4, 12)
    assert shapes["down.weight"] == (6, 8)
    assert shapes["embed.weight"] == (3, 12)
    assert training.sizes().parameters == 4 * sum(torch.Size(one).numel() for one in shapes.values())


def without_frozen(device):
    case = fit_cases.whole(device)
    case.model.requires_grad_()  # MemTracker cannot follow a frozen module
    return case


@pytest.mark.parametrize("make", [without_frozen, fit_cases.sharded])
def test_the_peak_is_that_of_torchs_own_tracker(make) -> None:
    with on_fake_rank(0, 8):
        training = Training(make(CPU), CPU)
        activations = training.run_batch()
        sizes = training.sizes()
    with on_fake_rank(0, 8):
        case = make(CPU)
        if make is fit_cases.sharded:
            tracker = fsdp2_mem_tracker.FSDPMemTracker(case.model)
            tracker.track_inputs(case.batch)
        else:
            tracker = fsdp2_mem_tracker.MemTracker()
            tracker.track_external(case.model, *case.batch)
        with tracker:
            case.criterion(case.model(case.batch[0]), case.batch[1]).backward()
        total = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    found = activations + sizes.parameters + sizes.gradients + sizes.buffers
    assert total - ROUNDING <= found <= total + ROUNDING


@pytest.mark.slow
def test_the_peak_grows_with_the_batch_alone() -> None:
    peaks = []
    for rows in (1000, 2000):
        with on_fake_rank(0, 8):
            case = fit_cases.sharded(CPU)
            long = (torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
            peaks.append(Training(type(case)(case.model, case.optimizer, case.criterion, long), CPU).run_batch())
    kept = 4 * (2 * 12 + 32 + 12 + 2 * 5) + 2 * 8  # outputs of the layers, logits, and the words of a row
    assert peaks[1] - peaks[0] >= 1000 * kept * 0.8


def test_several_optimizers() -> None:
    with on_fake_rank(0, 1):
        training = Training(fit_cases.several(CPU), CPU)
        activations = training.run_batch()
        training.step()
        sizes = training.sizes()
    assert sizes == (2 * 80, 2 * 80, 4 * 80, 0)
    assert activations < 16 * 512  # without the moments


def test_a_parameter_of_the_criterion() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(9))

        def forward(self, output, target):
            return (output.sum() * self.scale).sum()

    with on_fake_rank(0, 1):
        case = fit_cases.whole(CPU)
        training = Training(type(case)(case.model, case.optimizer, Scaled(), case.batch), CPU)
        assert training.sizes().parameters == 4 * (training.elements + 9)


def test_meshes_and_parameters_are_as_before() -> None:
    def patched():
        init = torch.nn.init._no_grad_trunc_normal_
        return dict(vars(DeviceMesh)), torch.utils.weakref, torch.UntypedStorage.resize_, init

    before = patched()
    with on_fake_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert mesh["a"].get_local_rank() == 0
        assert mesh.get_coordinate() in ([0, 1], (0, 1))
        assert DeviceMesh("cpu", torch.arange(4).view(2, 2)).mesh.tolist() == [[0, 1], [2, 3]]
        assert DeviceMesh("cpu", [0, 1, 2, 3]).size() == 4
        linear = torch.nn.Linear(2, 2)
        weight = linear.weight
        assert linear.to(torch.bfloat16).weight is weight
        assert weight.dtype == torch.bfloat16
        assert torch.nn.init.trunc_normal_(weight) is weight
    assert before == patched()
    assert not torch.distributed.is_initialized()


def test_batches_of_loaders() -> None:
    with on_fake_rank(0, 2):
        for make in (fit_cases.from_a_loader, fit_cases.from_an_iterator):
            assert Training(make(CPU), CPU).run_batch() > 0
        case = fit_cases.from_a_loader(CPU)
        with pytest.raises(CaseUnusable):
            Training(type(case)(case.model, case.optimizer, case.criterion, case.batch.dataset), CPU).run_batch()


def test_state_that_is_made_before_a_value_is_read() -> None:
    model = torch.nn.Linear(4, 6)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one) and one.dim()]
    with on_fake_rank(0, 1):
        training = Training(fit_cases.with_adafactor(CPU), CPU)
        training.run_batch()
        training.step()
        assert training.sizes().optimizer == nbytes(state)
