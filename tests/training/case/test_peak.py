"""Peak memory of a case, and a device that is too small for it."""

from __future__ import annotations

import sys
import textwrap
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ckptmove.proof.place import Site  # it imports torch
from ckptmove.training.case import peak  # it imports torch

KIB = 1024
#: Linear(64, 64), Linear(64, 64): two weights of 16 KiB and two biases of one block.
PARAMETERS = 2 * (16 * KIB + 512)
SCRIPT = """
import torch
from torch import nn
import ckptmove

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        hidden = torch.relu(self.one(x))
        return self.two(hidden) * self.scale

def case(device, rows=64):
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        batch = batch.to(device)
        loss = model(batch).square().mean()
        return loss

    return ckptmove.Case(model, optimizer, None, torch.randn(rows, 64), step)

def large_batch(device):
    made = case(device, 4)
    step = lambda batch: made.step(torch.zeros(4096, 64, device=device))
    return ckptmove.Case(made.model, made.optimizer, None, made.batch, step)

def few_rows(device):
    return case(device, 4)

def many_rows(device):
    return case(device, 512)

def without_state(device):
    made = case(device, 4)
    return ckptmove.Case(made.model, torch.optim.SGD(made.model.parameters(), lr=0.1), None, made.batch, made.step)

def deleting(device):
    made = case(device, 4)

    def step(batch):
        before = torch.cuda.memory_allocated()
        large = torch.zeros(256, 1024, device=device)
        small = torch.zeros(3)  # on the CPU
        del large
        assert torch.cuda.memory_allocated() == before
        return made.step(batch)

    return ckptmove.Case(made.model, made.optimizer, None, made.batch, step)

def whole_step(device):
    made = case(device, 512)
    model, optimizer = made.model, made.optimizer
    tried = []

    def step(batch):
        while True:
            optimizer.zero_grad()
            rows = len(batch) >> len(tried)
            try:
                loss = model(batch[:rows].to(device)).square().mean()
                loss.backward()
                optimizer.step()
            except torch.OutOfMemoryError:
                loss = None
                tried.append(torch.cuda.memory_allocated())
                continue
            assert tried, "it fits"
            assert torch.cuda.max_memory_allocated() <= torch.cuda.get_device_properties(device).total_memory
            return loss

    return ckptmove.Case(model, {"optimizer": optimizer}, None, made.batch, step)
"""


def number_of(source):
    """Number of a line of the script."""
    return SCRIPT.splitlines().index(textwrap.indent(source, "        ")) + 1


@pytest.fixture
def check(answers, make, tmp_path, monkeypatch):
    """The check of a function of the script."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)

    def check(function="case", to="cuda:0", optimizer="AdamW", **options):
        net = torch.nn.Module()
        net.one, net.two = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        net.register_buffer("scale", torch.ones(()))
        path = make(optimizer, model=net, device="cpu")
        return answers(path, to, case=f"train.py:{function}", **options)["case"]

    return check


def test_the_peak_of_a_step_has_a_line_and_kinds(check):
    evidence = check()["evidence"]
    kinds = evidence["peak_memory"]
    assert kinds["parameters"] == PARAMETERS + 512  # and the buffer
    assert kinds["optimizer_state"] == 2 * PARAMETERS
    assert sum(kinds.values()) == evidence["peak_bytes"]
    assert (evidence["peak_during"], evidence["device_memory"]) == ("backward", None)
    assert evidence["peak_at"] == f"train.py:{number_of('loss = model(batch).square().mean()')}"


def test_a_step_of_few_rows_has_its_peak_in_the_optimizer(check):
    evidence = check("few_rows")["evidence"]
    kinds = evidence["peak_memory"]
    assert (evidence["peak_during"], evidence["peak_at"]) == ("optimizer.step", "")
    assert kinds["gradients"] == kinds["parameters"] - 512 == PARAMETERS
    assert kinds["optimizer_state"] == 2 * PARAMETERS


@pytest.mark.unmeasured
def test_the_verdict_has_the_peak_and_the_limit(check):
    found = check(device_memory=2**20)
    nbytes = found["evidence"]["peak_bytes"]
    assert found["status"] == "passed", found["detail"]
    assert f"peak memory {nbytes / KIB:.1f} KiB of 1.0 MiB" in found["detail"]
    assert found["evidence"]["device_memory"] == 2**20


def test_the_peak_is_the_least_memory_that_suffices(check):
    nbytes = check()["evidence"]["peak_bytes"]
    assert check(device_memory=nbytes)["status"] == "passed"
    assert check(device_memory=nbytes - 1)["status"] == "failed"


@pytest.mark.parametrize(
    ("function", "device_memory", "kind", "during"),
    [
        ("many_rows", 500 * KIB, "other", ""),
        ("many_rows", 700 * KIB, "other", "backward"),
        ("few_rows", 5 * PARAMETERS, "optimizer_state", "optimizer.step"),
        ("without_state", 2 * PARAMETERS, "parameters", "backward"),
    ],
)
def test_a_device_that_is_too_small_fails_the_check(check, function, device_memory, kind, during):
    found = check(function, optimizer="SGD" if function == "without_state" else "AdamW", device_memory=device_memory)
    evidence = found["evidence"]
    assert (found["status"], evidence["peak_during"]) == ("failed", during)
    assert evidence["error"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate ")
    assert evidence["peak_bytes"] <= device_memory < evidence["peak_bytes"] + evidence["requested_bytes"]
    assert max(evidence["peak_memory"], key=evidence["peak_memory"].get) == kind
    assert evidence["fix"] == peak._FIXES[kind]
    assert len(found["failures"]) == 2
    assert evidence["file"] == "train.py"


def test_a_batch_that_does_not_fit_is_to_be_smaller(check):
    evidence = check("large_batch", device_memory=500 * KIB)["evidence"]
    assert evidence["requested_bytes"] == 1024 * KIB
    assert max(evidence["peak_memory"], key=evidence["peak_memory"].get) == "optimizer_state"
    assert evidence["fix"] == peak._FIXES["other"]


def test_the_line_of_a_forward_that_does_not_fit_is_named(check):
    evidence = check("many_rows", device_memory=4 * PARAMETERS)["evidence"]
    assert evidence["line"] == number_of("batch = batch.to(device)")
    evidence = check("many_rows", device_memory=4 * PARAMETERS + 150 * KIB)["evidence"]
    assert evidence["line"] == number_of("hidden = torch.relu(self.one(x))")


def test_a_model_that_does_not_fit_has_no_kinds(check):
    found = check(device_memory=PARAMETERS // 2)
    assert found["evidence"]["source"] == "model = Net().to(device)"
    assert found["evidence"]["fix"] == peak._UNKNOWN


def test_state_that_does_not_fit_fails_the_restore(check):
    evidence = check(device_memory=2 * PARAMETERS)["evidence"]
    assert evidence["peak_during"] == "optimizer.load_state_dict"
    assert evidence["peak_memory"]["parameters"] > PARAMETERS


def test_a_search_for_the_batch_size_ends_as_on_a_real_device(check):
    found = check("whole_step", device_memory=600 * KIB)
    assert found["status"] == "passed", found["detail"]
    assert found["evidence"]["peak_bytes"] <= 600 * KIB


def test_a_deleted_tensor_is_not_kept_by_the_record_of_calls(check):
    found = check("deleting")
    assert found["status"] == "passed", found["detail"]


def test_mps_raises_its_own_error(check):
    error = check("many_rows", to="mps", device_memory=4 * PARAMETERS)["evidence"]["error"]
    assert error.startswith("RuntimeError: MPS backend out of memory (MPS allocated: ")


def test_memory_of_the_cpu_is_not_counted(check):
    assert "peak_bytes" not in check(to="cpu")["evidence"]


def test_a_line_of_the_users_hook_is_that_of_the_hook(answers, make, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    script = """
    import torch
    from torch import nn
    import ckptmove

    def grown(gradient):
        return gradient + torch.zeros(1 << 20, device=gradient.device)[:1]

    def case(device):
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)
        model[0].weight.register_hook(grown)
        batch = torch.randn(4, 6), torch.randn(4, 3)
        return ckptmove.Case(model, torch.optim.AdamW(model.parameters()), nn.MSELoss(), batch)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    evidence = answers(make(), "cuda:0", case="train.py:case")["case"]["evidence"]
    assert (evidence["peak_at"], evidence["peak_during"]) == ("train.py:7", "")


class FakeModule:
    """The module of a real device, without one."""

    def __init__(self, total):
        self.total, self.fractions, self.is_reset = total, [], False

    def get_device_properties(self, device):
        return SimpleNamespace(total_memory=self.total)

    def recommended_max_memory(self):
        return self.total

    def set_per_process_memory_fraction(self, *fraction):
        self.fractions.append(fraction)


class FakeCuda(FakeModule):
    def reset_peak_memory_stats(self, device):
        self.is_reset = True

    def max_memory_allocated(self, device):
        return 3 << 30


NOBODY = SimpleNamespace(is_own=lambda file: False)


def test_an_allocation_of_no_user_has_no_line():
    assert peak.locator(NOBODY)(sys._getframe()) == peak.AllocationPlace(None)


@pytest.mark.parametrize(("limit", "fraction"), [(8 << 30, 0.5), (80 << 30, 1.0)])
def test_a_real_device_is_limited_and_asked_for_its_peak(monkeypatch, limit, fraction):
    module, site = FakeCuda(16 << 30), Site("cuda:0", "real")
    monkeypatch.setattr(torch, "cuda", module)
    with peak.memory_recorded(site, limit, NOBODY) as record:
        usage = peak.peak_of(record, site, limit)
    assert module.fractions == [(fraction, torch.device("cuda:0"))]
    assert module.is_reset
    assert peak.peak_text(usage) == f"peak memory 3.0 GiB of {limit >> 30}.0 GiB"
    figures = {"peak_bytes": 3 << 30, "peak_device": "cuda:0", "device_memory": limit}
    assert peak.peak_evidence(usage, NOBODY) == figures


def test_a_real_mps_device_is_limited_and_has_no_peak(monkeypatch):
    module, site = FakeModule(16 << 30), Site("mps", "real")
    monkeypatch.setattr(torch, "mps", module)
    with peak.memory_recorded(site, 8 << 30, NOBODY) as record:
        assert peak.peak_of(record, site, 8 << 30) is None
    with peak.memory_recorded(site, None, NOBODY):
        pass
    assert module.fractions == [(0.5,)]
