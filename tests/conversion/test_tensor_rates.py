"""A learning rate that is a tensor: where torch keeps it, and that every command leaves it there."""

from __future__ import annotations

import catalogue
import pytest
import torch
from simulation import on_a_simulated_device
from trained import OPTIMIZERS, Training, as_plain, device_by_path, save

import ckptmove
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.step.stored_state import optimizer_state_dict

RATES = ("optimizer.param_groups.0.lr", "optimizer.param_groups.0.initial_lr",
         "scheduler.base_lrs.0", "scheduler._last_lr.0")  # fmt: skip


def run(name="AdamW", **options):
    return Training(name, lr=torch.tensor(1e-3), **options).train(3).tree()


def placed(path, name="AdamW", place=None, **options):
    tree = run(name, **options)
    return save(tree, path, place or device_by_path("cuda:0", name))


def devices_of(path):
    return {one.name: one.device for one in ckptmove.inspect(path).inventory.tensors if one.name in RATES}


def test_load_state_dict_leaves_the_tensors_of_a_group_where_they_are():
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    loaded = optimizer.param_groups[0]["lr"]
    assert loaded.device.type == "cpu"
    assert loaded is not state["param_groups"][0]["lr"]


def test_a_scheduler_keeps_copies_beside_the_rate():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.1))
    state = torch.optim.lr_scheduler.StepLR(optimizer, 2).state_dict()
    [group] = optimizer.param_groups
    kept = [group["initial_lr"], *state["base_lrs"], *state["_last_lr"]]
    assert all(isinstance(one, torch.Tensor) and one.device == group["lr"].device for one in kept)
    assert len({one.untyped_storage().data_ptr() for one in [group["lr"], *kept]}) == 1 + len(kept)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_healthy_file_is_left_as_it_is(name, tmp_path):
    path = placed(tmp_path / "run.pth", name)
    if not any(one.endswith(".lr") for one in devices_of(path)):
        pytest.skip("this torch makes a number of it")
    assert set(devices_of(path).values()) == {"cpu"}
    found = ckptmove.inspect(path, expect="cuda:0")
    assert found.plan.is_empty
    assert ckptmove.convert(path, to="cuda:0", dry_run=True).plan.is_empty


@pytest.mark.parametrize("target", ["cuda:0", "cuda:3", "mps", "cpu"])
def test_it_stays_on_the_cpu_wherever_the_rest_goes(target, tmp_path):
    source = placed(tmp_path / "run.pth", place=lambda _: "cpu")
    moved = ckptmove.convert(source, to=target, output=tmp_path / "moved.pth").output
    assert devices_of(moved) == dict.fromkeys(RATES, "cpu")
    back = ckptmove.convert(moved, to="cpu", output=tmp_path / "back.pth").output
    tree, again = torch.load(source, weights_only=True), torch.load(back, weights_only=True)
    assert torch.equal(tree["optimizer"]["param_groups"][0]["lr"], again["optimizer"]["param_groups"][0]["lr"])
    assert [
        edit.names for edit in ckptmove.convert(back, to=target, dry_run=True).plan.edits if RATES[0] in edit.names
    ] == []


@pytest.mark.parametrize(
    ("target", "home"), [("cpu", "cpu"), ("cuda:3", "cuda:3"), ("mps", "mps"), ("cuda:0", "cuda:0")]
)
def test_one_that_map_location_took_along_goes_where_there_is_a_device(target, home, tmp_path):
    source = placed(tmp_path / "run.pth", place=lambda path: "cpu" if path[-1] == "step" or "rng" in path else "cuda:0")
    assert set(devices_of(source).values()) == {"cuda:0"}
    moved = ckptmove.convert(source, to=target, output=tmp_path / "moved.pth").output
    assert devices_of(moved) == dict.fromkeys(RATES, home)


def with_objects(*, fused=False):
    """A model, its optimizer and its scheduler: ``defaults`` of the optimizer has the tensor of its groups."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.defaults["lr"] is optimizer.param_groups[0]["lr"]
    return model, optimizer, scheduler


@pytest.mark.parametrize("what", ["optimizer", "scheduler", "the optimizer alone"])
@pytest.mark.parametrize(("fused", "home"), [(False, "cpu"), (True, "cuda:0")])
def test_the_defaults_of_a_pickled_optimizer_stay_with_its_groups(what, fused, home, tmp_path):
    model, optimizer, scheduler = with_objects(fused=fused)
    tree = {
        "optimizer": {"model": model.state_dict(), "optimizer": optimizer},
        "scheduler": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler},
        "the optimizer alone": optimizer,
    }[what]
    torch.save(tree, tmp_path / "run.pth")
    moved = ckptmove.convert(tmp_path / "run.pth", to="cuda:0", output=tmp_path / "moved.pth").output
    placed = {one.name: one.device for one in ckptmove.inspect(moved).inventory.tensors}
    rates = {name: device for name, device in placed.items() if name.endswith("lr")}
    assert any("defaults" in name for name in rates)
    assert set(rates.values()) == {home}
    assert {device for name, device in placed.items() if name.endswith("exp_avg")} == {"cuda:0"}
    assert ckptmove.inspect(moved, expect="cuda:0").plan.is_empty


@on_a_simulated_device
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}], ids=str)
def test_verify_passes_what_convert_has_written_and_what_a_gpu_has(options, tmp_path):
    place = device_by_path("cuda:0", "AdamW")

    def on_gpu(path):
        return "cuda:0" if path[-1] == "step" and options.get("fused") else place(path)

    source = placed(tmp_path / "run.pth", place=on_gpu, **options)
    converted = ckptmove.convert(placed(tmp_path / "cpu.pth", place=lambda _: "cpu", **options), to="cuda:0",
                                 output=tmp_path / "moved.pth").output  # fmt: skip
    for path in (source, converted):
        result = catalogue.verdict(path, to="cuda:0")
        assert result.passed, [check for check in result.checks if check.status == "failed"]
        assert result.proven


def test_verify_reads_tensor_betas_and_not_the_defaults(tmp_path):
    path = placed(tmp_path / "run.pth", place=lambda _: "cpu", betas=(torch.tensor(0.5), torch.tensor(0.6)))
    result = catalogue.verdict(path, to="cpu", against=path)
    assert result.proven
    [step] = [check for check in result.checks if check.name == "step"]
    assert "defaults" not in step.detail
    refused = placed(tmp_path / "bad.pth", place=lambda _: "cpu")
    tree = torch.load(refused, weights_only=True)
    tree["optimizer"]["param_groups"][0]["betas"] = (torch.tensor(1.5), torch.tensor(0.6))
    torch.save(tree, refused)
    [step] = [check for check in catalogue.verdict(refused, to="cpu").checks if check.name == "step"]
    assert step.status == "failed"


def test_a_rate_of_zero_is_idle_as_a_tensor_too(tmp_path):
    tree = run()
    tree["optimizer"]["param_groups"][0]["lr"].zero_()
    path = as_plain(tree, tmp_path, lambda _: "cpu")
    result = catalogue.verdict(path, to="cpu")
    assert not [check for check in result.checks if check.status == "failed"]


def test_a_case_is_given_tensor_options(tmp_path):
    path = placed(tmp_path / "run.pth", place=lambda _: "cpu", betas=(torch.tensor(0.5), torch.tensor(0.6)))

    class Source:
        def tensor(self, record):
            return record.name

    with open_checkpoint(path) as checkpoint:
        [optimizer] = checkpoint.inventory.optimizers
        [group] = optimizer_state_dict(optimizer, checkpoint, Source(), Limits())["param_groups"]
    assert group["lr"] == RATES[0]
    assert group["betas"] == ("optimizer.param_groups.0.betas.0", "optimizer.param_groups.0.betas.1")
