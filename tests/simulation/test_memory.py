"""The memory of simulated devices, compared with the sizes of the tensors that are live."""

from __future__ import annotations

import sys
from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckptmove.simulation.accounting import recorded  # it imports torch
from ckptmove.simulation.device import PlainSimulatedTensor, SimulatedDevice  # it imports torch
from ckptmove.simulation.errors import unsupported_operation  # it imports torch
from ckptmove.simulation.identity import foreach_by_default  # it imports torch

WIDTH, ROWS, LAYERS = 64, 32, 4
ACTIVATION, WEIGHT = ROWS * WIDTH * 4, WIDTH * WIDTH * 4


def line(frame):
    """The line of the test in a frame or its callers."""
    while frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame.f_lineno


@pytest.fixture
def record(cuda):
    with cuda, foreach_by_default(PlainSimulatedTensor), recorded(None, line) as record:
        yield record


@pytest.fixture
def used(record, cuda):
    """The bytes in use."""
    return lambda: record.of(cuda._home).used


@pytest.fixture
def peak(used):
    """The most bytes in use while a function runs, more than before it."""

    def peak(function):
        before = used()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before

    return peak


def layers(count=LAYERS):
    parts = [part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    return nn.Sequential(*parts).to("cuda:0")


def rows():
    return torch.randn(ROWS, WIDTH).to("cuda:0")


def test_a_step_of_adam_takes_the_memory_of_its_tensors(record, used):
    weights = LAYERS * WEIGHT
    model = layers()
    assert used() == weights
    optimizer = torch.optim.AdamW(model.parameters())
    batch = rows()
    output = model(batch)
    # Each layer saves its input; the output of ReLU is the input of the next layer.
    assert used() == weights + (1 + LAYERS) * ACTIVATION
    output.square().mean().backward()
    del output
    assert used() == 2 * weights + ACTIVATION
    optimizer.step()
    assert used() == 4 * weights + ACTIVATION
    # The step with foreach makes one temporary tensor for each parameter.
    assert record.at_peak().nbytes == 5 * weights + ACTIVATION
    assert record.at_peak().kinds == {
        "parameters": weights,
        "gradients": weights,
        "optimizer_state": 2 * weights,
        "other": weights + ACTIVATION,
    }
    optimizer.zero_grad(set_to_none=True)
    assert used() == 3 * weights + ACTIVATION
    # The kinds at the peak stay known when the tensors are gone.
    assert record.at_peak().kinds["gradients"] == weights


def test_a_peak_has_the_line_that_reached_it(record):
    first = torch.ones(1000, device="cuda:0")
    expected = line(sys._getframe()) + 1
    second = first + 1
    del second
    third = first * 2
    assert record.at_peak().place == expected
    assert third.shape == first.shape


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_lower_the_peak(peak, reentrant):
    model, batch = layers(16), rows().requires_grad_()

    def plain():
        model(batch).sum().backward()

    def in_segments():
        hidden = batch
        for segment in (model[at : at + 8] for at in range(0, len(model), 8)):
            hidden = checkpoint(segment, hidden, use_reentrant=reentrant)
        hidden.sum().backward()

    plain()  # makes the gradients
    assert peak(in_segments) < peak(plain)


def test_without_gradients_an_activation_lives_until_the_next_one(peak):
    model, batch = layers(), rows()
    with torch.no_grad():
        assert peak(lambda: model(batch)) == 2 * ACTIVATION
    with torch.inference_mode():
        assert peak(lambda: model(batch)) == 2 * ACTIVATION


def test_views_and_deleted_tensors_take_no_memory(used):
    whole = torch.zeros(4, WIDTH, WIDTH, device="cuda:0")
    views = [whole[1], whole.flatten(), whole.detach(), whole.data, nn.Parameter(whole)]
    assert used() == 4 * WEIGHT
    del whole
    assert used() == 4 * WEIGHT
    del views
    assert used() == 0


def test_a_tensor_on_the_cpu_is_not_counted(record, used):
    there = rows()
    back = there.cpu()
    del there
    assert (used(), back.shape) == (0, (ROWS, WIDTH))


def test_each_device_has_its_own_memory(record):
    with SimulatedDevice("cuda:1"):
        one, two = torch.zeros(1000, device="cuda:0"), torch.zeros(3000, device="cuda:1")
        assert [torch.cuda.memory_allocated(index) for index in range(2)] == [4096, 12288]
        assert record.at_peak().device == two.simulated_on
        assert one.dim() == two.dim()


def test_resized_memory_is_counted_anew(used):
    tensor = torch.zeros(0, device="cuda:0")
    assert used() == 0
    tensor.resize_(WIDTH, WIDTH)
    assert used() == WEIGHT
    large = torch.zeros(8 * WIDTH, WIDTH, device="cuda:0")
    del large
    tensor.resize_(4 * WIDTH, WIDTH)
    assert used() == 4 * WEIGHT
    del tensor
    assert used() == 0


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_the_parts_of_a_sparse_tensor_are_counted(used, layout):
    more = ((2, 2),) if "_b" in layout else ()
    there = getattr(torch.eye(WIDTH), f"to_{layout}")(*more).to("cuda:0")
    assert used() > WIDTH * 4
    del there
    assert used() == 0


def test_the_backward_of_a_recurrent_layer_is_counted(used):
    layer, batch = nn.LSTM(WIDTH, WIDTH).to("cuda:0"), rows()
    before = used()
    output, _ = layer(batch)
    assert used() > before + 4 * ACTIVATION  # of its four gates
    output.sum().backward()


@pytest.mark.parametrize("activation", ["gelu", "mish", "relu", "silu"])
def test_an_activation_function_has_no_temporary_tensors(peak, activation):
    batch = rows().requires_grad_()
    # The output and the gradient of the batch; the gradient of a sum is one value.
    assert peak(lambda: getattr(nn.functional, activation)(batch).sum().backward()) < 3 * ACTIVATION


def test_attention_weights_are_not_counted(used):
    query = torch.randn(1, 1, 512, WIDTH, device="cuda:0", requires_grad=True)
    before = used()
    attended = nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1)
    assert used() == before + attended.nbytes


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=8), st.data())
def test_bytes_in_use_are_those_of_the_live_tensors_in_blocks(sizes, data):
    with SimulatedDevice("cuda:0"), recorded(None, line):
        tensors = [torch.zeros(size, dtype=torch.uint8, device="cuda:0") for size in sizes]
        for _ in range(data.draw(st.integers(0, len(tensors)))):
            tensors.pop(data.draw(st.integers(0, len(tensors) - 1)))
        expected = sum(-(-len(one) // 512) * 512 for one in tensors)
        assert torch.cuda.memory_allocated() == expected


def test_every_api_of_memory_gives_the_same_figures(record, mps):
    tensor = torch.zeros(WIDTH, WIDTH, device="cuda:0")
    peak_only = torch.zeros(WIDTH, WIDTH, device="cuda:0")
    del peak_only
    for module in (torch.cuda, torch.cuda.memory, torch.accelerator, torch.accelerator.memory):
        assert module.memory_allocated() == module.memory_reserved(0) == WEIGHT
        assert module.max_memory_allocated() == module.max_memory_reserved("cuda:0") == 2 * WEIGHT
        assert module.memory_stats()["allocated_bytes.all.peak"] == 2 * WEIGHT
        assert module.memory_stats()["reserved_bytes.all.current"] == WEIGHT
    free, total = torch.cuda.mem_get_info()
    assert torch.accelerator.get_memory_info() == (free, total)
    assert total - free == WEIGHT
    assert total == torch.cuda.get_device_properties(0).total_memory
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == WEIGHT
    assert record.at_peak().nbytes == 2 * WEIGHT
    with mps:
        there = tensor.to("mps")
        assert torch.mps.current_allocated_memory() == torch.mps.driver_allocated_memory() == WEIGHT
        assert torch.mps.recommended_max_memory() == total
        assert there.shape == tensor.shape


def test_a_record_ends(cuda):
    with cuda, recorded(None, line) as record:
        inside = torch.zeros(WIDTH, WIDTH, device="cuda:0")
    with cuda:
        outside = torch.zeros(WIDTH, WIDTH, device="cuda:0")
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 0)
    assert record.at_peak().nbytes == WEIGHT
    assert inside.shape == outside.shape


def test_a_record_without_tensors_has_no_peak(cuda):
    with cuda, recorded(None, line) as record:
        assert record.at_peak() is None


#: No machine has them: more bytes than the addresses of a process.
TOO_MANY = 1 << 50


def test_what_the_cpu_cannot_allocate_does_not_fit_either(cuda):
    with cuda, recorded(1 << 30, line), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1\.0 PiB"):
        torch.empty(TOO_MANY, dtype=torch.uint8, device="cuda:0")


def test_what_the_cpu_cannot_allocate_is_a_limit_of_the_simulation(cuda):
    with cuda, recorded(None, line), pytest.raises(RuntimeError) as raised:
        torch.empty(TOO_MANY, dtype=torch.uint8, device="cuda:0")
    assert unsupported_operation(raised.value)
    assert not isinstance(raised.value, torch.OutOfMemoryError)


def test_a_backward_that_was_caught_keeps_no_tensor(cuda):
    with cuda, recorded(None, line) as record:
        memory = record.of(cuda._home)
        weight = torch.ones(WIDTH, WIDTH, device="cuda:0", requires_grad=True)
        weight.register_hook(lambda _: torch.empty(TOO_MANY, dtype=torch.uint8, device="cuda:0"))
        for _ in range(3):
            with suppress(RuntimeError):
                (rows() @ weight).exp().sum().backward()
            assert memory.used == WEIGHT
