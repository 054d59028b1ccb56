"""The schedulers, scalers, averages and RNG states of a checkpoint, and what takes them."""

from __future__ import annotations

import contextlib
import random
import weakref

import pytest
import torch

from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.loading.values import values_at
from ckptmove.proof.place import TorchDevice
from ckptmove.proof.tensors.stored import StoredTensors
from ckptmove.training.case.taken import Taking, stored_parts

SCHEDULER = {"last_epoch": 40, "_step_count": 41, "base_lrs": [0.1], "_last_lr": [0.05], "step_size": 3, "gamma": 0.5}
SCALER = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 17}
EMA = {"weight": torch.rand(3, 2), "bias": torch.rand(3), "steps": torch.tensor(3)}
CUDA, MPS = torch.zeros(16, dtype=torch.uint8), torch.ones(44, dtype=torch.uint8)
STATE = torch.get_rng_state()
NUMPY = ("MT19937", torch.arange(624), 623, 0, 0.0)


@pytest.fixture
def opened(make):
    """The parts of a checkpoint, and what is not taken of them."""
    with contextlib.ExitStack() as stack:

        def opened(target="cuda:0", **tree):
            path = make.save({"model": {"weight": torch.rand(3)}, **tree}, device="cpu")
            checkpoint = stack.enter_context(open_checkpoint(path, Limits(), keep_trees=True))
            stored = stack.enter_context(StoredTensors(checkpoint.parts))
            return Taking(stored_parts(checkpoint, target), stored.tensor, TorchDevice("cpu"))

        yield opened


def paths(taking):
    return [one.path for one in taking.left]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"scheduler": SCHEDULER, "scaler": SCALER}, ["scheduler", "scaler"]),
        ({"lr_schedulers": [SCHEDULER, SCHEDULER | {"gamma": 0.1}]}, ["lr_schedulers.0", "lr_schedulers.1"]),
        ({"schedulers": {"G": SCHEDULER}}, ["schedulers.G"]),
        ({"lr_schedulers": [], "scaler": {}, "rng": [], "ema": {}}, []),
        ({"rng": STATE}, ["rng"]),
        ({"rng_state": {"torch": STATE, "cuda": [CUDA, CUDA], "python": random.getstate(), "numpy": NUMPY}},
         ["rng_state.torch", "rng_state.cuda", "rng_state.python", "rng_state.numpy"]),
        ({"ema": EMA, "best_ema": dict(EMA)}, ["ema"]),
        ({"ema": {"decay": 0.9, "shadow": EMA}}, ["ema"]),
    ],
)  # fmt: skip
def test_the_parts_of_a_checkpoint(opened, tree, expected):
    assert sorted(paths(opened(**tree))) == sorted(expected)


@pytest.mark.parametrize(
    ("target", "expected"), [("cpu", ["rng"]), ("mps", ["mps_rng", "rng"]), ("cuda:1", ["cuda_rng", "rng"])]
)
def test_states_of_generators_that_the_target_lacks_are_no_parts(opened, target, expected):
    assert sorted(paths(opened(target, rng=STATE, cuda_rng=[CUDA], mps_rng=MPS))) == expected


@pytest.mark.parametrize(
    ("tree", "given", "left"),
    [
        ({"scheduler": SCHEDULER}, SCHEDULER, []),
        ({"scheduler": SCHEDULER}, {**SCHEDULER, "more": [object()]}, []),
        ({"scheduler": SCHEDULER}, SCHEDULER | {"last_epoch": 0}, ["scheduler"]),
        ({"scheduler": SCHEDULER}, {"scheduler": SCHEDULER}, ["scheduler"]),
        ({"scheduler": {"kind": "step", "state": SCHEDULER}}, SCHEDULER, []),
        ({"scaler": SCALER, "scheduler": SCHEDULER}, SCALER, ["scheduler"]),
        ({"scaler": {"scale": torch.tensor(8.0)}}, {"scale": torch.tensor(8.0)}, []),
        ({"scaler": {"scale": torch.tensor(8.0), "growth": 2}}, torch.tensor(8.0), ["scaler"]),
        ({"rng": STATE}, STATE.clone(), []),
        ({"rng": STATE}, STATE + 1, ["rng"]),
        ({"rng": STATE}, STATE[1:], ["rng"]),
        ({"cuda_rng": [CUDA, CUDA + 1]}, CUDA, []),
        ({"rng": {"seed": 3, "state": STATE}}, STATE, []),
        ({"python_rng": random.getstate()}, random.getstate(), []),
        ({"numpy_rng": NUMPY}, ("MT19937", object(), 623, 0, 0.0), []),
        ({"ema": EMA}, dict(EMA), []),
        ({"ema": EMA}, {**EMA, "bias": torch.zeros(3)}, ["ema"]),
        ({"ema": {"decay": 0.9, "shadow": EMA}}, {"decay": 0.9}, ["ema"]),
    ],
)
def test_a_part_is_taken_by_its_values(opened, tree, given, left):
    taking = opened(**tree)
    taking.note(given)
    assert paths(taking) == left
    taking.note(given)
    assert paths(taking) == left


class Broken(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self):
        pass

    def state_dict(self):
        raise RuntimeError("not built")


def test_a_scheduler_without_a_state_has_taken_nothing(opened):
    taking = opened(scheduler=SCHEDULER)
    taking.note(SCHEDULER, Broken())
    assert paths(taking) == ["scheduler"]


def test_a_value_that_contains_itself_is_read_once(opened):
    given = dict(SCHEDULER)
    given["self"] = given
    taking = opened(scheduler=SCHEDULER)
    taking.note(given)
    assert paths(taking) == []


def scheduler(epoch):
    """A scheduler that is built at an epoch."""
    made = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "initial_lr": 0.1}], lr=0.1)
    return torch.optim.lr_scheduler.StepLR(made, 3, last_epoch=epoch - 1)


@pytest.mark.parametrize(("epoch", "left"), [(2, ["scaler"]), (0, ["scaler", "scheduler"])])
def test_a_scheduler_that_is_built_at_the_stored_epoch_has_the_stored_part(opened, epoch, left):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    live = {torch.optim.lr_scheduler.LRScheduler: [scheduler(1), scheduler(epoch)], torch.amp.GradScaler: [scaler]}
    stored = scheduler(2).state_dict() | {"_step_count": 3}
    taking = opened(scheduler=stored, scaler=SCALER)
    taking.note_live(live.__getitem__, list, lambda _: False)
    assert sorted(paths(taking)) == left
    scaler.load_state_dict(SCALER)
    taking.note_live(live.__getitem__, list, lambda _: False)
    assert "scaler" not in paths(taking)


@pytest.mark.parametrize("is_idle", [True, False])
def test_an_average_is_taken_if_its_tensors_are_in_use(opened, is_idle):
    taking = opened(ema=EMA)
    held = [one.clone() for one in EMA.values()]
    gone = weakref.ref(torch.ones(3))
    known = [gone, *(weakref.ref(one) for one in held)]
    taking.note_live(lambda _: [], lambda: known, lambda _: is_idle)
    assert paths(taking) == (["ema"] if is_idle else [])


def test_a_whole_file_is_a_part_by_its_name(tmp_path):
    torch.save(SCHEDULER, tmp_path / "scheduler.pt")
    torch.save(EMA, tmp_path / "model.pt")
    for path, expected in ((tmp_path, "scheduler.pt"), (tmp_path / "scheduler.pt", "")):
        with open_checkpoint(str(path), Limits(), keep_trees=True) as checkpoint:
            (part,) = stored_parts(checkpoint, "cpu")
            assert part.path == expected
            assert values_at(checkpoint, {expected}) == {expected: part.value}
