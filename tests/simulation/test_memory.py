"""The memory in use that a simulated device reports, compared with the sizes of the tensors that are live."""

from __future__ import annotations

from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptmove.simulation import accounting  # it imports torch
from ckptmove.simulation.device import SimulatedDevice  # it imports torch
from ckptmove.simulation.errors import unsupported_operation  # it imports torch

WIDTH = 64
WEIGHT = WIDTH * WIDTH * 4
#: No machine has them: more bytes than the addresses of a process.
TOO_MANY = 1 << 50


@pytest.fixture
def used(cuda):
    """The bytes in use, less those before the test."""
    with cuda:
        before = torch.cuda.memory_allocated()
        yield lambda index=0: torch.cuda.memory_allocated(index) - before


def test_a_step_of_adam_takes_the_memory_of_its_tensors(used):
    model = nn.Linear(WIDTH, WIDTH, bias=False).to("cuda:0")
    assert used() == WEIGHT
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(1, WIDTH, device="cuda:0")).sum().backward()
    assert used() == 2 * WEIGHT
    optimizer.step()
    assert used() == 4 * WEIGHT
    optimizer.zero_grad()
    assert used() == 3 * WEIGHT


def test_views_and_deleted_tensors_take_no_memory(used):
    whole = torch.zeros(4, WIDTH, WIDTH, device="cuda:0")
    views = [whole[1], whole.flatten(), whole.detach(), whole.data, nn.Parameter(whole)]
    assert used() == 4 * WEIGHT
    back = whole.cpu()
    del whole, back
    assert used() == 4 * WEIGHT
    del views
    assert used() == 0


def test_each_device_has_its_own_memory(used):
    with SimulatedDevice("cuda:1"):
        before = torch.cuda.memory_allocated(1)
        tensors = [torch.zeros(1000, device="cuda:0"), torch.zeros(3000, device="cuda:1")]
        assert (used(), torch.cuda.memory_allocated(1) - before) == (4000, 12000)
        assert len(tensors) == 2


def test_resized_memory_is_counted_anew(used):
    tensor = torch.zeros(0, device="cuda:0")
    for rows in (WIDTH, 4 * WIDTH):
        tensor.resize_(rows, WIDTH)
        assert used() == rows * WIDTH * 4
    del tensor
    assert used() == 0


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_left_out(used):
    there = torch.eye(WIDTH).to_sparse_csr().to("cuda:0")
    assert used() == 0
    assert there.shape == (WIDTH, WIDTH)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=8), st.data())
def test_bytes_in_use_are_those_of_the_live_tensors(sizes, data):
    with SimulatedDevice("cuda:0"):
        before = torch.cuda.memory_allocated()
        tensors = [torch.zeros(size, dtype=torch.uint8, device="cuda:0") for size in sizes]
        for _ in range(data.draw(st.integers(0, len(tensors)))):
            tensors.pop(data.draw(st.integers(0, len(tensors) - 1)))
        assert torch.cuda.memory_allocated() - before == sum(map(len, tensors))


def test_every_api_of_memory_gives_the_same_figures(used, mps):
    torch.cuda.reset_peak_memory_stats()
    tensor, peak_only = (torch.zeros(WIDTH, WIDTH, device="cuda:0") for _ in range(2))
    del peak_only
    now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    assert (used(), most - now) == (WEIGHT, WEIGHT)
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
        assert module.memory_allocated() == module.memory_reserved(0) == now
        assert module.max_memory_allocated() == module.max_memory_reserved("cuda:0") == most
        assert module.memory_stats()["allocated_bytes.all.peak"] == most
        assert module.memory_stats()["reserved_bytes.all.current"] == now
    free, total = torch.cuda.mem_get_info()
    assert torch.accelerator.get_memory_info() == (free, total)
    assert total - free == now
    assert total == torch.cuda.get_device_properties(0).total_memory == accounting.TOTAL
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == now
    with mps:
        before = torch.mps.current_allocated_memory()
        there = tensor.to("mps")
        assert torch.mps.current_allocated_memory() == torch.mps.driver_allocated_memory() == before + WEIGHT
        assert torch.mps.recommended_max_memory() == total
        assert there.shape == tensor.shape


def test_what_the_cpu_cannot_allocate_is_a_limit_of_the_simulation(used):
    with pytest.raises(RuntimeError) as raised:
        torch.empty(TOO_MANY, dtype=torch.uint8, device="cuda:0")
    assert unsupported_operation(raised.value)
    assert not isinstance(raised.value, torch.OutOfMemoryError)


def test_a_backward_that_was_caught_keeps_no_tensor(used):
    weight = torch.ones(WIDTH, WIDTH, device="cuda:0", requires_grad=True)
    weight.register_hook(lambda _: torch.empty(TOO_MANY, dtype=torch.uint8, device="cuda:0"))
    for _ in range(3):
        with suppress(RuntimeError):
            (torch.ones(4, WIDTH, device="cuda:0") @ weight).exp().sum().backward()
        assert used() == WEIGHT
