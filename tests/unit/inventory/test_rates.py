"""The learning rates that schedulers have set last, against the schedulers themselves."""

from __future__ import annotations

import torch

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
