"""Fixtures of the tests with a checkpoint, a simulated device or the checks of the worker."""

from __future__ import annotations

import pytest
import verifying

from ckptmove.training import worker

skip_what_this_torch_cannot_simulate = verifying.skip_what_this_torch_cannot_simulate
cuda_first, cuda, mps, make, answers = (
    verifying.cuda_first,
    verifying.cuda,
    verifying.mps,
    verifying.make,
    verifying.answers,
)
mended, fault_of = verifying.mended, verifying.fault_of


@pytest.fixture(autouse=True)
def training_alone(monkeypatch):
    """Check a case or a script without the steps of the file, which `tests/proof` asks for."""
    steps = worker.resume

    def without_training(bench, *group):
        return () if bench.request.runs_training else steps(bench, *group)

    monkeypatch.setattr(worker, "resume", without_training)
