"""Findings about a directory with an unreadable file: none depends on the content of that file."""

from __future__ import annotations

import shutil

import pytest
import torch

import ckptmove
from ckptmove.errors import UnreadableInput

SHARDS = [f"pytorch_model-{number:05}-of-00002.bin" for number in (1, 2)]


def codes(folder):
    return {one.code for one in ckptmove.inspect(folder, keep_going=True).findings}


def cut(path):
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize("damage", [cut, lambda path: path.unlink()], ids=["cut", "missing"])
@pytest.mark.parametrize("name", SHARDS)
def test_an_optimizer_is_not_held_against_part_of_its_model(build, name, damage):
    folder = build.hf_trainer(shards=2)
    healthy = codes(folder)

    damage(folder / name)

    found = ckptmove.inspect(folder, keep_going=True)
    assert len(found.unreadable) == 1
    assert found.inventory.is_incomplete
    assert {one.code for one in found.findings} <= healthy
    with pytest.raises(UnreadableInput):
        ckptmove.inspect(folder)


@pytest.mark.parametrize("name", ["rng_state.pth", "scheduler.pt"])
def test_what_an_unread_file_may_hold_is_not_called_absent(build, name):
    folder = build.hf_trainer()
    healthy = codes(folder)
    assert "R302" not in healthy

    cut(folder / name)
    assert codes(folder) <= healthy

    (folder / name).unlink()
    assert "R302" in codes(folder)


def test_moments_may_be_where_the_unread_part_of_the_model_is(build):
    folder = build.hf_trainer(shards=2)
    model, optimizer = build.trained()
    layers = list(model.state_dict().items())[2:]
    build.save(folder / SHARDS[1], dict(layers), "cuda:1")
    first, second = optimizer.state_dict(), optimizer.state_dict()
    first["state"] = {key: first["state"][key] for key in (0, 1)}
    second["state"] = {key: second["state"][key] for key in (2, 3)}
    build.save(folder / "optimizer.pt", first, "cuda:0")
    build.save(folder / "optimizer_1.pt", second, "cuda:1")
    build.save(folder / "training_args.bin", {"device": torch.device("cuda:1")})
    healthy = codes(folder)
    assert healthy.isdisjoint({"D102", "D104"})

    cut(folder / SHARDS[1])

    assert codes(folder) <= healthy


def test_checkpoints_of_which_one_is_broken_are_not_one_model(build):
    for name, device in (("run/checkpoint-1", "cuda:0"), ("run/checkpoint-2", "cuda:1")):
        build.hf_trainer(name, device)
    healthy = codes(build.root / "run")
    assert "D101" not in healthy

    cut(build.root / "run" / "checkpoint-2" / "optimizer.pt")

    assert codes(build.root / "run") <= healthy


def test_a_scheduler_may_be_of_the_optimizer_that_was_not_read(build):
    folder = build.hf_trainer()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    build.save(folder / "other_optimizer.pt", other.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    build.save(folder / "scheduler.pt", schedule.state_dict())
    healthy = codes(folder)
    assert "R304" not in healthy

    cut(folder / "other_optimizer.pt")

    assert codes(folder) <= healthy


def test_a_file_with_a_model_and_its_optimizer_is_judged_by_itself(build):
    model, optimizer = build.trained()
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] += [4, 5]
    build.save(build.root / "run" / "last.pth", {"model": model.state_dict(), "optimizer": state})
    shutil.copy(build.root / "run" / "last.pth", build.root / "run" / "older.pth")
    assert "O206" in codes(build.root / "run")

    cut(build.root / "run" / "older.pth")

    assert "O206" in codes(build.root / "run")


@pytest.mark.parametrize("name", ["brain.ckpt", "notes.ckpt"])
def test_the_counters_of_speechbrain_are_text(tmp_path, name):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    torch.save(net.state_dict(), tmp_path / "model.ckpt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.ckpt")
    torch.save({"losses": [], "n_steps": 8}, tmp_path / "noam_annealing.ckpt")
    (tmp_path / name).write_text("avg_train_loss: 0.5\nstep: 4\n")
    contents = ckptmove.inspect(tmp_path, keep_going=True).inventory.contents
    assert contents == {"scheduler", *["counter"] * (name == "brain.ckpt")}
