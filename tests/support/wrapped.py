"""``nn.DataParallel`` on the CPU, whatever device an earlier test of this process has simulated."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(autouse=True)
def data_parallel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch moves a module to the first accelerator that it finds, and a simulated one stays registered."""
    module = importlib.import_module("torch.nn.parallel.data_parallel")  # its package has a function of this name
    monkeypatch.setattr(module, "_get_available_device_type", lambda: None)
