"""``verify --fit``: the figures are those of FSDP2 itself, on a process group that sends nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
import zero_runs
from torch import nn

import ckptmove
from ckptmove.errors import UsageError
from ckptmove.training.fit.sizes import parse_fit

pytest.importorskip("torch.distributed.fsdp", reason="no FSDP2")


class Net(nn.Module):
    """Parameters of fewer rows than ranks, of uneven rows, of another dtype, tied, frozen; and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 12)
        self.norm = nn.BatchNorm1d(12)
        self.up = nn.Linear(12, 33)
        self.low = nn.Linear(33, 12).to(torch.bfloat16)
        self.frozen = nn.Linear(12, 12).requires_grad_(requires_grad=False)
        self.head = nn.Linear(12, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(7, dtype=torch.int64))

    def forward(self, words):
        up = self.up(self.norm(self.embed(words)))
        return self.head(self.frozen(self.low(up.to(torch.bfloat16)).float()))


def step(model, **options):
    """One step of AdamW; the optimizer."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, **options)
    model(torch.arange(4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint of a model that is not sharded."""
    model = Net()
    path = tmp_path_factory.mktemp("fit") / "run.pth"
    optimizer = step(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def nbytes(tensors):
    """Bytes of the local pieces."""
    pieces = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return sum(one.numel() * one.element_size() for one in pieces)


def measured(rank, ranks):
    """Bytes of parameters, gradients, moments and buffers on a rank, as FSDP2 splits them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        model = Net()
        mesh = init_device_mesh("cpu", (ranks,))
        for part in (model.low, model.frozen, model):  # each of one dtype, and trained or not
            fully_shard(part, mesh=mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = step(model, foreach=False)
        parameters = [*model.parameters()]
        moments = [one for state in optimizer.state.values() for one in state.values() if one.dim()]
        gradients = [one.grad for one in parameters if one.grad is not None]
        return tuple(map(nbytes, (parameters, gradients, moments, model.buffers())))
    finally:
        dist.destroy_process_group()


@pytest.mark.unmeasured
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_the_figures_are_those_of_fsdp(saved, ranks) -> None:
    fit = ckptmove.verify(saved, fit=f"{ranks}x1GB").fit
    buffers = nbytes([Net().norm.num_batches_tracked])
    found = (fit.parameters, fit.gradients, fit.optimizer, fit.buffers)
    first, last = measured(0, ranks), measured(ranks - 1, ranks)
    assert found == first
    assert fit.smallest == sum(last)
    assert fit.total == sum(first)
    assert fit.free == 10**9 - fit.total
    assert fit.largest_parameter == 33 * 12 * 4
    assert buffers == 8


def test_a_checkpoint_that_does_not_fit(saved) -> None:
    whole = ckptmove.verify(saved, fit="1x1GB").fit.total
    result = ckptmove.verify(saved, fit="1x4KB")
    assert not result.passed
    assert not result.ok
    (check,) = result.checks
    assert (check.name, check.status) == ("fit", "failed")
    assert whole > 4000
    least = next(ranks for ranks in range(1, 100) if ckptmove.verify(saved, fit=f"{ranks}x4KB").passed)
    assert f" {least} ranks" in check.detail
    never = ckptmove.verify(saved, fit="4x0.1KB").checks[0].detail
    assert "no number of ranks" in never
    assert "cannot be split" in never


def test_a_parameter_that_never_fits_whole(saved) -> None:
    detail = ckptmove.verify(saved, fit="64x1.55KB").checks[0].detail
    assert "no number of ranks" in detail
    assert "up.weight must be gathered whole: 1.5 KiB" in detail
    assert "cannot be split" not in detail
    assert "model.up.weight, takes 1.5 KiB" in ckptmove.verify(saved, fit="2x1GB").checks[0].detail


def test_a_gathered_parameter_has_to_fit(saved) -> None:
    for ranks in (1, 64):
        fit = ckptmove.verify(saved, fit=f"{ranks}x1GB").fit
        gathered = fit.largest_parameter if ranks > 1 else 0
        enough = (fit.total + gathered) / 1000
        assert ckptmove.verify(saved, fit=f"{ranks}x{enough}KB").passed
        assert not ckptmove.verify(saved, fit=f"{ranks}x{enough - 0.001:.3f}KB").passed


def test_the_verdict_as_one_line(saved) -> None:
    assert str(ckptmove.verify(saved, fit="4x1GB")).endswith("fits on 4 ranks")
    assert str(ckptmove.verify(saved, fit="1x1GB")).endswith("fits on 1 rank")
    assert "1 ranks" not in ckptmove.verify(saved, fit="1x1GB").checks[0].detail


def test_no_device_has_a_mode(saved) -> None:
    (found,) = ckptmove.verify(saved, fit="4x1GB").to_dict()["results"]
    assert found["mode"] is None
    assert found["target"] == "4x1GB"


def test_weights_alone(tmp_path) -> None:
    torch.save(Net().state_dict(), tmp_path / "weights.pth")
    odd = nn.Linear(3, 1)
    odd.weight, odd.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
    torch.save(odd.state_dict(), tmp_path / "odd.pth")
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    fit = ckptmove.verify(tmp_path / "weights.pth", fit="4x1GB").fit
    assert (fit.optimizer, fit.gradients) == (0, fit.parameters)
    odd = ckptmove.verify(tmp_path / "odd.pth", fit="4x1GB").fit
    assert odd.parameters == 8  # the bias, on the first rank; a scalar is on every rank, and no row on none
    assert not ckptmove.verify(tmp_path / "other.pth", fit="4x1GB").passed


def test_a_sharded_checkpoint(tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": Net().state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    sharded, whole = tmp_path / "dcp", tmp_path / "whole.pth"
    torch.save({"model": Net().state_dict()}, whole)
    assert ckptmove.verify(sharded, fit="3x1GB").fit.parameters >= ckptmove.verify(whole, fit="3x1GB").fit.parameters


def test_partitions_of_parameters(tmp_path) -> None:
    with pytest.raises(UsageError):
        ckptmove.verify(zero_runs.made(tmp_path / "run", ranks=3), fit="4x1GB")


@pytest.mark.parametrize(
    "text",
    [
        "", "64", "x80GiB", "64x", "0x80GiB", "64x80", "9999999x1GB", "1048577x1GB", "-1x1GB", "4x-1GB", "4x0GB",
        "4x9999999999999999GB", "4x1GB\nx", "٦x1GB",
    ],
)  # fmt: skip
def test_no_such_devices(text) -> None:
    with pytest.raises(UsageError) as caught:
        parse_fit(text)
    assert "\n" not in str(caught.value)
    assert "64x80GiB" in str(caught.value)


@pytest.mark.parametrize("text", ["64x80GiB", " 64 x 80 GiB", "64X80gib", "64×80GiB", "64*80GiB"])
def test_devices(text) -> None:
    assert parse_fit(text) == (64, 80 * 2**30)


@pytest.mark.parametrize(
    "options",
    [
        {"to": "cuda"}, {"against": "a.pth"}, {"script": "x.py"}, {"sample": 1}, {"optimizer": "AdamW"},
        {"device_memory": 1}, {"require_device": True}, {"strip_prefix": ["module."]},
    ],
    ids=str,
)  # fmt: skip
def test_no_other_check_is_made(saved, options) -> None:
    with pytest.raises(UsageError):
        ckptmove.verify(saved, fit="1x1GB", **options)


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.SGD, torch.optim.AdamW])
def test_gradients_of_other_optimizers(tmp_path, optimizer) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    made = optimizer(model.parameters(), lr=0.1)

    def loss():
        made.zero_grad()
        found = model(torch.ones(2, 3)).sum()
        found.backward()
        return found

    made.step(loss)
    torch.save({"model": model.state_dict(), "optimizer": made.state_dict()}, tmp_path / "run.pth")
    fit = ckptmove.verify(tmp_path / "run.pth", fit="2x1GB").fit
    assert fit.gradients == fit.parameters
