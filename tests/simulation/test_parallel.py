"""`nn.DataParallel` on simulated devices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import _functions, comm

from ckptmove.simulation.device import SimulatedDevice


def trained(model, inputs):
    model(inputs).square().sum().backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [1, 2])
def test_replicas_give_the_gradients_of_one_model(count, monkeypatch):
    monkeypatch.setattr(_functions, "_streams", None)  # torch counts the devices of a process once
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    inputs = torch.randn(6, 4)
    expected = trained(copy.deepcopy(model), inputs)
    device = SimulatedDevice(f"cuda:{count - 1}")
    with device:
        found = trained(nn.DataParallel(model.to("cuda:0"), device_ids=[*range(count)]), inputs)
        assert {one.device for one in found} == {torch.device("cuda:0")}
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(device.to_cpu(one), other)


def test_a_replica_needs_its_parameters_on_the_first_device():
    with SimulatedDevice("cuda:1"), pytest.raises(RuntimeError, match="device_ids"):
        nn.DataParallel(nn.Linear(2, 2), device_ids=[0, 1])(torch.ones(2, 2))


def test_copies_go_to_the_devices_that_are_named():
    with SimulatedDevice("cuda:1"):
        parts = comm.scatter(torch.arange(6.0), [0, torch.device("cuda:1")], [2, 4])
        assert [(one.device.index, one.numel()) for one in parts] == [(0, 2), (1, 4)]
        assert comm.gather(parts).tolist() == [0, 1, 2, 3, 4, 5]
        assert comm.gather(parts, destination="cuda:1").device.index == 1
        assert comm.gather(parts, destination="cpu").device.type == "cpu"
        (total,) = comm.reduce_add_coalesced([[parts[0]], [parts[1][:2]]], 1)
        assert (total.device.index, total.tolist()) == (1, [2, 4])
        assert comm.reduce_add_coalesced([[parts[0]]])[0].device.index == 0
        copies = comm.broadcast_coalesced([parts[0]], [0, 1])
        assert [[one.device.index for one in same] for same in copies] == [[0], [1]]
        assert copies[0][0] is parts[0]
