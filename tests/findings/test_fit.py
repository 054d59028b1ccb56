"""``inspect --fit``: the figures are those of FSDP2 itself, on a process group that sends nothing."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import zero_runs
from safetensors.torch import save_file
from torch import nn

import ckptmove
from ckptmove.errors import UnreadableInput, UsageError
from ckptmove.findings.fit import NotWhole, parse_fit

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


@pytest.mark.parametrize("ranks", [3, *(pytest.param(one, marks=pytest.mark.unmeasured) for one in (1, 2, 8, 64))])
def test_the_figures_are_those_of_fsdp(saved, ranks) -> None:
    fit = ckptmove.inspect(saved, fit=f"{ranks}x1GB").fit
    buffers = nbytes([Net().norm.num_batches_tracked])
    found = (fit.parameters, fit.gradients, fit.optimizer, fit.buffers)
    first = measured(0, ranks)
    assert found == first
    assert fit.total >= sum(measured(ranks - 1, ranks))
    assert fit.total == sum(first)
    assert fit.free == 10**9 - fit.total
    assert fit.largest_parameter == 33 * 12 * 4
    assert buffers == 8


def test_a_checkpoint_that_does_not_fit(saved) -> None:
    whole = ckptmove.inspect(saved, fit="1x1GB").fit.total
    result = ckptmove.inspect(saved, fit="1x4KB")
    assert not result.ok
    assert result.to_dict()["exit_code"] == 1
    assert result.to_dict()["checkpoints"][0]["fit"] == result.fit._asdict()
    assert whole > 4000
    least = next(ranks for ranks in range(1, 100) if ckptmove.inspect(saved, fit=f"{ranks}x4KB").ok)
    assert result.fit.least_ranks == least
    assert f" {least} devices" in str(result.fit)


@pytest.mark.parametrize("devices", ["4x0.1KB", "64x1.55KB"])
def test_what_no_number_of_devices_is_enough_for(saved, devices) -> None:
    fit = ckptmove.inspect(saved, fit=devices).fit
    assert (fit.fits, fit.least_ranks) == (False, 0)
    assert fit.least_bytes > fit.largest_parameter
    assert (fit.largest_name, fit.largest_parameter) == ("model.up.weight", 33 * 12 * 4)


@pytest.mark.parametrize(
    ("devices", "least"), [("1x110MB", 1), ("2x110MB", 1), ("9x250MB", 1), ("8x110MB", 1), ("1x90MB", 0)]
)
def test_fewer_devices_may_be_enough(tmp_path, devices, least) -> None:
    """A single device gathers nothing, so that it may need less than two."""
    model = nn.Sequential(nn.Embedding(1, 95 << 18, _weight=torch.empty(1, 95 << 18)), nn.Linear(3, 3))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model[1](torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pth")
    fit = ckptmove.inspect(tmp_path / "run.pth", fit=devices).fit
    assert fit.fits is (devices in {"1x110MB", "9x250MB"})
    assert fit.least_ranks == least
    whole = ckptmove.inspect(tmp_path / "run.pth", fit="1x1GB").fit
    assert fit.least_bytes == whole.total
    assert ("; 1 device is enough" in str(fit)) is (not fit.fits and least == 1)


def test_fewer_than_asked_of_several_devices(saved) -> None:
    fits = {ranks: ckptmove.inspect(saved, fit=f"{ranks}x4KB").fit for ranks in (1, 2, 64)}
    assert len({one.least_ranks for one in fits.values()}) == 1
    assert fits[64].fits


def test_a_gathered_parameter_has_to_fit(saved) -> None:
    for ranks in (1, 64):
        fit = ckptmove.inspect(saved, fit=f"{ranks}x1GB").fit
        gathered = fit.largest_parameter if ranks > 1 else 0
        enough = (fit.total + gathered) / 1000
        assert ckptmove.inspect(saved, fit=f"{ranks}x{enough}KB").ok
        assert not ckptmove.inspect(saved, fit=f"{ranks}x{enough - 0.001:.3f}KB").ok


def test_the_figures_as_one_line(saved) -> None:
    assert str(ckptmove.inspect(saved, fit="4x1GB").fit).startswith("fits on 4 devices of 953.7 MiB: ")
    assert str(ckptmove.inspect(saved, fit="1x1KB").fit).startswith("does not fit on 1 device of 1000 B: ")


def test_weights_alone(tmp_path) -> None:
    torch.save(Net().state_dict(), tmp_path / "weights.pth")
    odd = nn.Linear(3, 1)
    odd.weight, odd.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.0))
    torch.save(odd.state_dict(), tmp_path / "odd.pth")
    fit = ckptmove.inspect(tmp_path / "weights.pth", fit="4x1GB").fit
    assert (fit.optimizer, fit.gradients) == (0, fit.parameters)
    assert str(fit).startswith("weights and gradients fit on 4 devices of 953.7 MiB; the checkpoint has no optimizer ")
    assert f" AdamW adds twice the gradients ({2 * fit.gradients / 1024:.1f} KiB)" in str(fit)
    small = ckptmove.inspect(tmp_path / "weights.pth", fit="1x4KB").fit
    assert str(small).startswith("does not fit on 1 device")
    assert str(small).endswith(f"; {small.least_ranks} devices are enough for weights and gradients")
    odd = ckptmove.inspect(tmp_path / "odd.pth", fit="4x1GB").fit
    assert odd.parameters == 8  # the bias, on the first rank; a scalar is on every rank, and no row on none


def test_a_sharded_checkpoint(tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": Net().state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    sharded, whole = tmp_path / "dcp", tmp_path / "whole.pth"
    torch.save({"model": Net().state_dict()}, whole)
    tied, once = (ckptmove.inspect(path, fit="3x1GB").fit for path in (sharded, whole))
    embedding = 2 * 12 * 4  # two of five rows: a distributed checkpoint has them twice
    assert tied.parameters - once.parameters == tied.gradients - once.gradients == embedding


@pytest.fixture
def shards(tmp_path):
    """A model in two files with an index, and a directory with one of them alone."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for place in ("whole", "lost", "bare"):
        folder = tmp_path / place
        folder.mkdir()
        for name in names[: 2 if place == "whole" else 1]:
            save_file({f"{name[:11]}.weight": torch.zeros(4, 4)}, folder / name)
        if place != "bare":
            index = {"weight_map": {f"{name[:11]}.weight": name for name in names}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_model_with_a_shard_missing_is_refused(shards) -> None:
    assert ckptmove.inspect(shards / "whole", fit="1x1GB").fit.parameters == 2 * 4 * 4 * 4
    with pytest.raises(NotWhole) as caught:
        ckptmove.inspect(shards / "whole" / "model-00001-of-00002.safetensors", fit="1x1GB")
    assert caught.value.hint.endswith(str(shards / "whole"))
    with pytest.raises(NotWhole):
        ckptmove.inspect(shards / "bare", fit="1x1GB")
    with pytest.raises(UnreadableInput, match="model-00002-of-00002"):
        ckptmove.inspect(shards / "lost", fit="1x1GB", keep_going=True)
    assert ckptmove.inspect(shards / "lost", keep_going=True).unreadable


def test_a_shard_of_a_rank_alone_is_refused(tmp_path) -> None:
    save_file({"weight": torch.zeros(4, 4)}, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(NotWhole):
        ckptmove.inspect(tmp_path / "shard-00001-model-00001-of-00001.safetensors", fit="1x1GB")


def test_a_file_without_parameters_is_refused(tmp_path) -> None:
    torch.save(step(Net()).state_dict(), tmp_path / "optimizer.pt")
    torch.save({"epoch": 3}, tmp_path / "other.pth")
    for name in ("optimizer.pt", "other.pth"):
        with pytest.raises(NotWhole) as caught:
            ckptmove.inspect(tmp_path / name, fit="1x1GB")
        assert caught.value.hint


def test_partitions_of_parameters(tmp_path) -> None:
    with pytest.raises(NotWhole) as caught:
        ckptmove.inspect(zero_runs.made(tmp_path / "run", ranks=3), fit="4x1GB")
    assert "ZeRO" in str(caught.value)
    assert caught.value.hint


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


@pytest.mark.parametrize("text", ["64x80GiB", " 64 x 80 GiB", "64X80gib", "64×80GiB", "64*80GiB"])
def test_devices(text) -> None:
    assert parse_fit(text) == (64, 80 * 2**30)


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
    fit = ckptmove.inspect(tmp_path / "run.pth", fit="2x1GB").fit
    assert fit.gradients == fit.parameters
