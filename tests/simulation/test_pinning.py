from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset

from ckptmove.simulation import pinning as simulated_pinning  # it imports torch


def test_a_tensor_of_the_cpu_is_pinned(cuda):
    plain = torch.arange(6.0).reshape(2, 3).t()
    with cuda:
        pinned = plain.pin_memory()
        assert pinned.is_pinned()
        assert pinned[0].is_pinned()
        assert pinned.pin_memory() is pinned
        assert not plain.is_pinned()
        assert not pinned.to(cuda.device, non_blocking=True).is_pinned()
        assert not pinned.clone().is_pinned()
    assert torch.equal(pinned, plain)
    assert pinned.stride() == plain.stride()
    assert pinned.data_ptr() != plain.data_ptr()


def test_a_factory_pins_what_it_makes_on_the_cpu_alone(cuda):
    with cuda:
        assert torch.zeros(2, pin_memory=True).is_pinned()
        assert torch.empty_like(torch.ones(2), pin_memory=True).is_pinned()
        for make in (torch.ones, torch.empty):
            with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
                make(2, device=cuda.device, pin_memory=True)


def test_a_tensor_of_the_device_cannot_be_pinned(cuda, mps):
    for device, dtype, name in (
        (cuda, torch.float32, "torch.cuda.FloatTensor"),
        (cuda, torch.bfloat16, "torch.cuda.BFloat16Tensor"),
        (mps, torch.int64, "torch.mps.LongTensor"),
    ):
        with device, pytest.raises(RuntimeError) as raised:
            torch.ones(2, dtype=dtype, device=device.device).pin_memory()
        assert str(raised.value) == f"cannot pin '{name}' only dense CPU tensors can be pinned"


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor")  # which torch's own loader gave until 2.10
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_pins_its_batches(cuda, workers):
    rows = torch.arange(8.0).reshape(4, 2)
    with cuda:
        batches = list(DataLoader(TensorDataset(rows), batch_size=2, pin_memory=True, num_workers=workers))
    assert all(one.is_pinned() for (one,) in batches)
    assert torch.equal(torch.cat([one for (one,) in batches]), rows)


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor")  # which torch's own loader gave until 2.10
def test_a_loader_cannot_pin_what_is_on_the_device(cuda):
    with cuda:
        loader = DataLoader(TensorDataset(torch.ones(4, 2, device=cuda.device)), batch_size=2, pin_memory=True)
        with pytest.raises(RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors"):
            next(iter(loader))


def test_memory_that_is_gone_is_forgotten(cuda):
    with cuda:
        kept = torch.ones(2).pin_memory()
        for _ in range(5):
            torch.ones(2).pin_memory()
        gc.collect()
        kept_too = torch.ones(2).pin_memory()
    alive = [one for one in simulated_pinning._PINNED if not one.expired()]
    assert len(simulated_pinning._PINNED) <= len(alive) + 1
    assert kept.is_pinned()
    assert kept_too.is_pinned()
