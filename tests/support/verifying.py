"""Checkpoints of real optimizers with the tags of any device, and the checks of the worker in this process."""

from __future__ import annotations

import gc

import pasting
import pytest
import simulation
import torch
from answers import checks_of

from ckptmove.api.document import finding_to_json
from ckptmove.proof.request import VerifyRequest
from ckptmove.simulation.device import SimulatedDevice, unavailable_reason
from ckptmove.training.worker import run

skip_what_this_torch_cannot_simulate = simulation.skip_what_this_torch_cannot_simulate
mended, fault_of = pasting.mended, pasting.fault_of
PLACED: dict[int, tuple[object, str]] = {}


def tag(storage):
    """Return tags like torch's taggers: a new string each time for cuda, a constant for mps."""
    _, device = PLACED.get(storage.data_ptr(), (None, "cpu"))
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    return kind + ":" + str(int(index)) if index else "mps"


torch.serialization.register_package(0, tag, lambda storage, location: None)


def tensors_of(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, (dict, list, tuple)):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            yield from tensors_of(value, f"{path}.{key}" if path else str(key))


class Maker:
    """Trains with a real optimizer, and saves with the tags of any device."""

    def __init__(self, folder):
        self.folder = folder

    def tree(self, optimizer="AdamW", steps=3, model=None, dtype=torch.float32, **options):
        torch.manual_seed(0)
        model = model or torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
        model = model.to(dtype)
        kind = getattr(torch.optim, optimizer, None) or pytest.skip(f"this torch has no {optimizer}")
        trained = kind([p for p in model.parameters() if optimizer != "Muon" or p.dim() == 2], **options)
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, dtype=torch.float32).to(parameter.dtype) * 0.01
            trained.step()
        return {"model": model.state_dict(), "optimizer": trained.state_dict(), "epoch": 3}

    def save(self, tree, name="c.pt", device="cuda:0", stay=("step",)):
        PLACED.clear()
        for path, tensor in tensors_of(tree):
            if device != "cpu" and path.rpartition(".")[2] not in stay:
                PLACED[tensor.untyped_storage().data_ptr()] = (tensor, device)
        path = self.folder / name
        torch.save(tree, path)
        PLACED.clear()
        return str(path)

    def __call__(self, optimizer="AdamW", name="c.pt", device="cuda:0", **options):
        return self.save(self.tree(optimizer, **options), name, device)


@pytest.fixture(scope="session", autouse=True)
def cuda_first():
    """Simulate cuda first: where torch runs without modes, as in `nn.DataParallel`, a number is the first device.

    A child of `verify` simulates no other kind.
    """
    if unavailable_reason() is None:
        SimulatedDevice("cuda:0")


@pytest.fixture(scope="module")
def cuda():
    return SimulatedDevice("cuda:0")


@pytest.fixture(scope="module")
def mps():
    return SimulatedDevice("mps")


@pytest.fixture
def make(tmp_path):
    return Maker(tmp_path)


@pytest.fixture
def answers():
    """Run the checks of the worker in this process; return them by name.

    Objects of earlier tests are frozen: the check of a script walks over all others.
    """
    gc.collect()
    gc.freeze()

    def ask(path, to, **options):
        messages = []
        run(VerifyRequest(path=path, to=to, **options), messages.append)
        found = checks_of(messages)
        found["mode"] = messages[0].mode
        found["findings"] = [finding_to_json(m.finding) for m in messages if m.finding is not None]
        return found

    return ask
