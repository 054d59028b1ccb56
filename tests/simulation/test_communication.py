"""A process group of one process that asks for NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptmove.simulation.communication import nccl_of_one_process


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", None])
@pytest.mark.filterwarnings("ignore")
def test_one_process_communicates_on_the_simulated_device(cuda, tmp_path, backend):
    with cuda:
        assert dist.is_nccl_available()
        dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            values = torch.arange(3.0, device="cuda")
            dist.all_reduce(values)
            dist.barrier(device_ids=[0])
            assert values.device == torch.device("cuda:0")
            assert values.tolist() == [0.0, 1.0, 2.0]
            assert dist.get_backend(dist.new_group([0], backend="nccl")) == "nccl"
            model = DistributedDataParallel(nn.Linear(3, 2).to("cuda"), device_ids=[0])
            model(values).sum().backward()
            assert model.module.weight.grad.tolist() == [[0.0, 1.0, 2.0]] * 2
        finally:
            dist.destroy_process_group()


def test_several_processes_and_other_backends_are_torchs_own(monkeypatch):
    groups = dist.distributed_c10d
    seen = []
    monkeypatch.setattr(groups, "_new_process_group_helper", lambda *given: seen.append(groups.BackendConfig(given[1])))
    with nccl_of_one_process():
        groups._new_process_group_helper(2, groups.Backend("nccl"))
        groups._new_process_group_helper(1, groups.Backend("gloo"))
        groups._new_process_group_helper(1, groups.Backend("nccl"))
    maps = [one.get_device_backend_map() for one in seen]
    assert maps[0]["cuda"] == "nccl"
    assert set(maps[1].values()) == set(maps[2].values()) == {"gloo"}
    assert {"cpu", "cuda"} <= maps[2].keys()


def test_a_torch_without_process_groups(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with nccl_of_one_process():
        assert not dist.is_available()
