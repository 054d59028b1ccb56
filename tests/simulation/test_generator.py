from __future__ import annotations

import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ckptmove.simulation import generator as simulated_generator  # it imports torch
from ckptmove.simulation.device import SimulatedDevice  # it imports torch

DRAWS = {
    "randn": lambda device, generator: torch.randn(3, generator=generator, device=device),
    "randint": lambda device, generator: torch.randint(9, (3,), generator=generator, device=device),
    "rand_in_place": lambda device, generator: torch.empty(3, device=device).uniform_(generator=generator),
    "normal_": lambda device, generator: torch.empty(3, device=device).normal_(generator=generator),
    "normal": lambda device, generator: torch.normal(torch.ones(3, device=device), 1.0, generator=generator),
    "bernoulli": lambda device, generator: torch.bernoulli(torch.ones(3, device=device), generator=generator),
    "multinomial": lambda device, generator: torch.multinomial(torch.ones(3, device=device), 2, generator=generator),
    "replaced": lambda device, generator: torch.ones(3, device=device).multinomial(
        4, replacement=True, generator=generator
    ),
    "init": lambda device, generator: nn.init.trunc_normal_(torch.empty(3, device=device), generator=generator),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_generator_draws_where_it_is_and_is_refused_elsewhere(cuda, mps, draw):
    for simulated in (cuda, mps):
        kind = simulated.target.partition(":")[0]
        with simulated:
            there = torch.Generator(device=simulated.device)
            assert simulated.device_of(draw(simulated.device, there)) == f"{kind}:0"
            assert draw("cpu", torch.Generator()).device.type == "cpu"
            for here in (torch.Generator(), torch.default_generator):
                with pytest.raises(
                    RuntimeError, match=f"Expected a '{kind}' device type for generator but found 'cpu'"
                ):
                    draw(simulated.device, here)
            with pytest.raises(RuntimeError, match=f"Expected a 'cpu' device type for generator but found '{kind}'"):
                draw("cpu", there)


def test_a_permutation_wants_exactly_its_device(cuda):
    other = SimulatedDevice("cuda:1")
    with other, cuda:
        there = torch.Generator(device="cuda")
        for device in (cuda.device, cuda.device.type):
            assert sorted(torch.randperm(4, generator=there, device=device).tolist()) == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match="Expected a 'cuda:1' generator device but found 'cuda:0'"):
            torch.randperm(4, generator=there, device=other.device)
        with pytest.raises(RuntimeError, match="Expected a 'cuda:0' generator device but found 'cpu'"):
            torch.randperm(4, generator=torch.Generator(), device=cuda.device)
        with pytest.raises(RuntimeError, match="Expected a 'cpu' generator device but found 'cuda:0'"):
            torch.randperm(4, generator=there)
        assert torch.randn(2, generator=there, device=other.device).is_cuda


def test_what_has_no_memory_takes_any_generator(cuda):
    with cuda:
        there = torch.Generator(device=cuda.device)
        assert torch.randn(2, generator=there, device="meta").device.type == "meta"


def test_the_same_seed_draws_the_same(cuda):
    with cuda:
        there = torch.Generator(cuda.device).manual_seed(3)
        drawn = torch.randn(3, generator=there, device=cuda.device)
    assert torch.equal(cuda.to_cpu(drawn), torch.randn(3, generator=torch.Generator().manual_seed(3)))


def test_a_generator_is_made_wherever_torch_makes_one(cuda):
    plain = torch.Generator
    with cuda:
        for asked in (cuda.device, torch.device("sim"), "cuda", "cuda:0"):
            assert torch.Generator(device=asked).device == cuda.device
        for asked in ((), ("cpu",), (None,)):
            made = torch.Generator(*asked)
            assert made.device.type == "cpu"
            assert type(made) is plain
            assert isinstance(made, torch.Generator)
        assert isinstance(torch.Generator("cuda"), plain)
        assert isinstance(torch.Generator("cuda"), torch.Generator)
        assert issubclass(plain, torch.Generator)
        assert not isinstance(3, torch.Generator)
    assert torch.Generator is plain
    with pytest.raises(RuntimeError):
        torch.Generator("cuda:7")


def test_a_generator_goes_on_from_a_state(cuda):
    with cuda:
        there = torch.Generator(cuda.device)
        state = there.get_state()
        copies = [there.clone_state(), copy.deepcopy(there), pickle.loads(pickle.dumps(there))]
        drawn = torch.rand(3, generator=there, device=cuda.device)
        for one in (*copies, there.set_state(state)):
            assert one.device == cuda.device
            assert torch.equal(torch.rand(3, generator=one, device=cuda.device), drawn)
        # The state of a GPU generator: a seed and an offset.
        saved = torch.tensor([7] + [0] * 15, dtype=torch.uint8)
        first, second = (torch.Generator(cuda.device).set_state(saved) for _ in range(2))
        assert torch.equal(*(torch.rand(3, generator=one, device=cuda.device) for one in (first, second)))


def test_a_generator_that_is_gone_leaves_nothing(cuda):
    with cuda:
        kept = torch.Generator(cuda.device)
        gc.collect()
        before = len(simulated_generator._HOMES)
        for _ in range(5):
            torch.Generator(cuda.device)
        gc.collect()
    assert len(simulated_generator._HOMES) == before
    assert kept.device == cuda.device


def test_lengths_of_sequences_are_read_on_the_cpu(cuda):
    with cuda:
        batch = torch.ones(2, 3, 1, device=cuda.device)
        with pytest.raises(RuntimeError) as raised:
            nn.utils.rnn.pack_padded_sequence(batch, torch.tensor([3, 2], device=cuda.device), batch_first=True)
    wanted = "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor"
    assert str(raised.value) == wanted
