"""The device of the target machine that a name refers to: by number, by type alone, and if it does not exist."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ckptmove.simulation import targets  # it imports torch
from ckptmove.simulation.device import SimulatedDevice  # it imports torch

ORDINAL = "CUDA error: invalid device ordinal"


@pytest.fixture(scope="module")
def second():
    return SimulatedDevice("cuda:1")


def test_a_kind_alone_is_its_first_device_until_another_is_chosen(second):
    with second:
        named = {"cuda:0": 0, "cuda:1": 1}
        for name, number in named.items():
            torch.cuda.set_device(number)
            assert torch.cuda.current_device() == number
            for asked in ("cuda", torch.device("sim"), number, name):
                assert targets.tag_of(targets.meant_by(asked)) == (name if asked != "cuda" else f"cuda:{number}")
            assert second.device_of(torch.ones(1, device=torch.device("sim"))) == name
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
            with torch.cuda.device_of(torch.ones(1, device=second.device)), torch.cuda.device(-1):
                assert torch.cuda.current_device() == 1
            with torch.cuda.device_of(torch.ones(1)), torch.cuda.device(None):
                assert torch.cuda.current_device() == 0
        torch.cuda.set_device(-1)
        assert torch.cuda.current_device() == 1
    with second:
        assert torch.cuda.current_device() == 0


@pytest.mark.filterwarnings("ignore:To copy construct")  # torch warns about this form
def test_what_a_tensor_makes_is_where_it_is(second, mps):
    for device in (second, mps, SimulatedDevice("cuda:40")):
        with device:
            there = torch.ones(2, device=device.device)
            for made in (there.new_tensor([1.0]), there.new_tensor(there), there.new(3), there.new_ones(1)):
                assert made.device == device.device
            assert there.new_tensor([1], dtype=torch.int8, device="cpu", requires_grad=False).device.type == "cpu"


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_bare_number_is_the_device_of_that_number():
    code = (
        "import torch\n"
        "from ckptmove.simulation.device import SimulatedDevice\n"
        "with SimulatedDevice('cuda:3') as sim:\n"
        "    one = torch.ones(1).to(3)\n"
        "    print(sim.device_of(one), one.get_device(), sim.device_of(torch.ones(1, device=1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cuda:3", "3", "cuda:1"]


def test_a_device_that_is_not_there_is_refused(cuda):
    with cuda:
        assert torch.cuda.device_count() == 1
        for use in (
            lambda: torch.ones(1, device=torch.device("sim", 1)),
            lambda: torch.ones(1).to(torch.device("sim", 1)),
            lambda: torch.Generator("cuda:7"),
            lambda: torch.Generator(7),
            lambda: torch.cuda.set_device(3),
            lambda: torch.cuda.device("cuda:1").__enter__(),
        ):
            with pytest.raises(RuntimeError, match=ORDINAL):
                use()
        for number in (1, torch.device("sim", 1)):
            with pytest.raises((AssertionError, RuntimeError), match=f"Invalid device id|{ORDINAL}"):
                torch.cuda.get_device_properties(number)
        with pytest.raises(IndexError, match="tuple index out of range"):
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(), 1)
        targets.at_least(2)
        assert torch.cuda.device_count() == 2
        other = torch.ones(2, device=targets.meant_by("cuda:1"))
        with pytest.raises(RuntimeError, match="at least two devices, cuda:1 and cuda:0!"):
            other + torch.ones(2, device=cuda.device)
    with SimulatedDevice("xpu:0"), pytest.raises(RuntimeError, match=r"xpu:2 .* 1 xpu device$"):
        targets.meant_by("xpu:2")
    assert isinstance(torch.cuda.device, type)


def test_what_is_a_class_stays_one(cuda):
    with cuda:
        assert isinstance(torch.cuda.device(0), torch.cuda.device)
        with torch.cuda.StreamContext(torch.cuda.Stream()) as nothing:
            assert nothing is None
        assert isinstance(torch.cuda.device_of(nn.Parameter(torch.ones(1))), torch.cuda.device)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_number_is_a_device_of_the_target_whatever_was_simulated_first(kind):
    device = SimulatedDevice(f"{kind}:1")
    with device:
        home = torch.ones(1).to(f"{kind}:1").simulated_on
        assert torch.ones(1).to(1).simulated_on == torch.ones(1, device=1).simulated_on == home
