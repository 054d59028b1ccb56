"""The last learning rates of schedulers, compared with the schedulers themselves."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import ckptmove


def test_rates_are_those_of_torch(tmp_path) -> None:
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": layer.parameters(), "lr": 0.1 * (1 + place)} for place, layer in enumerate(layers)]
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)
    optimizer.step()
    scheduler.step()
    tree = {"optimizer": optimizer.state_dict(), "schedulers": [scheduler.state_dict()], "_last_lr": [], "rates": [0.1]}
    path = str(tmp_path / "a.pt")
    torch.save(tree, path)
    found = ckptmove.inspect(path)
    assert found.inventory.last_rates == (("schedulers.0._last_lr", tuple(scheduler.get_last_lr())),)
    assert not [one for one in found.findings if one.code == "R304"]


def warm_up_then_cosine(optimizer):
    return schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 10)],
        [3],
    )


def both_at_once(optimizer):
    return schedulers.ChainedScheduler([schedulers.LinearLR(optimizer, 0.1), schedulers.ExponentialLR(optimizer, 0.9)])


SCHEDULERS = {
    "StepLR": lambda one: schedulers.StepLR(one, 2),
    "MultiStepLR": lambda one: schedulers.MultiStepLR(one, [1, 3]),
    "LambdaLR": lambda one: schedulers.LambdaLR(one, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda one: schedulers.MultiplicativeLR(one, lambda _: 0.9),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda one: schedulers.ExponentialLR(one, 0.9),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda one: schedulers.CosineAnnealingLR(one, 10),
    "CosineAnnealingWarmRestarts": lambda one: schedulers.CosineAnnealingWarmRestarts(one, 2),
    "CyclicLR": lambda one: schedulers.CyclicLR(one, 0.1, 0.3),
    "OneCycleLR": lambda one: schedulers.OneCycleLR(one, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda one: schedulers.ReduceLROnPlateau(one, patience=0),
    "SequentialLR": warm_up_then_cosine,
    "ChainedScheduler": both_at_once,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_no_scheduler_of_torch_is_accused_at_any_step(tmp_path, name) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    path = str(tmp_path / "a.pt")
    for step in range(6):
        optimizer.step()
        scheduler.step(*([1.0 + step] if name == "ReduceLROnPlateau" else []))
        torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, path)
        assert [one.message for one in ckptmove.inspect(path).findings if one.code == "R304"] == []


def test_a_scheduler_that_another_one_took_over_from_is_not_accused(tmp_path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    first, second = schedulers.CosineAnnealingLR(optimizer, 9), torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    for scheduler in (first, first, second, second):
        optimizer.step()
        scheduler.step()
    tree = {"optimizer": optimizer.state_dict(), "scheduler": first.state_dict(), "swa_scheduler": second.state_dict()}
    path = str(tmp_path / "a.pt")
    torch.save(tree, path)
    assert "R304" not in {one.code for one in ckptmove.inspect(path).findings}


def test_a_scheduler_beside_its_optimizer(tmp_path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.step()
    scheduler.step()
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    (finding,) = [one for one in ckptmove.inspect(str(tmp_path)).findings if one.code == "R304"]
    assert finding.where == ("scheduler.pt._last_lr",)
    assert "optimizer's group 0 0.1" in finding.message
