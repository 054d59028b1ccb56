"""Keep ``nn.DataParallel`` on the CPU, also after a test that simulated a device."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture(autouse=True)
def data_parallel_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide simulated devices: torch moves a module to the first accelerator that is registered."""
    module = importlib.import_module("torch.nn.parallel.data_parallel")  # its package has a function of this name
    monkeypatch.setattr(module, "_get_available_device_type", lambda: None)
