"""The parts of a checkpoint with a role of their own, with or without tensors."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import ckptmove


@pytest.fixture
def trained():
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def test_containers_have_sections_where_their_role_changes(trained, inventory_of) -> None:
    model, optimizer, scheduler = trained
    content = {
        "a": model.state_dict(),
        "b": {"inner": optimizer.state_dict()},
        "c": scheduler.state_dict(),
        "ema": {"shadow": model.state_dict()},
        "optimizer_states": [],
        "lr_schedulers": [scheduler.state_dict()],
        "config": {"depth": 3},
        "rng": {"cuda": [torch.ones(16, dtype=torch.uint8)]},
    }
    assert dict(inventory_of(content).sections) == {
        "a": "model",
        "b.inner": "optimizer",
        "c": "scheduler",
        "ema": "ema",
        "optimizer_states": "optimizer",
        "lr_schedulers": "scheduler",
        "rng": "rng",
    }


def test_pickled_objects_have_sections_too(trained, inventory_of) -> None:
    model, optimizer, scheduler = trained
    sections = inventory_of([model, optimizer, scheduler, {"loss": nn.CrossEntropyLoss()}]).sections
    assert dict(sections) == {"0": "model", "1": "optimizer", "2": "scheduler", "3.loss": "criterion"}
    assert len(sections) == 4
    assert inventory_of(model).sections == (("", "model"),)


def test_a_flat_optimizer_is_one_section(trained, inventory_of) -> None:
    model, optimizer, _ = trained
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    content = get_optimizer_state_dict(model, optimizer, options=options)
    assert inventory_of({"opts": content}).sections == (("opts", "optimizer"),)


def test_sections_of_a_directory_begin_with_their_file(trained, tmp_path) -> None:
    model, optimizer, scheduler = trained
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"unknown": 1}, tmp_path / "scheduler.pt")
    torch.save({"c": scheduler.state_dict()}, tmp_path / "other.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({}))
    assert dict(ckptmove.inspect(str(tmp_path)).inventory.sections) == {
        "pytorch_model.bin": "model",
        "optimizer.pt": "optimizer",
        "scheduler.pt": "scheduler",
        "other.pt.c": "scheduler",
    }
