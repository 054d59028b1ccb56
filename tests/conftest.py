"""What all tests share: processes that have imported torch, the commands of the app, and a small heap to collect."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer.testing
import warm_worker

from ckptmove.verification import child

# Before torch is imported: tests run in as many processes as there are processors, and their tensors are small. A
# second thread that waits for its turn takes up to a hundred times as long as the operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def forked_children():
    """Children of `verify` are forked from a process that has imported torch, where the system forks safely."""
    servers = warm_worker.Servers()
    forking = SimpleNamespace(Popen=servers.start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(child, "subprocess", forking)
        yield
    servers.stop()


@pytest.fixture(scope="session", autouse=True)
def built_commands():
    """Typer builds the commands of an app once, not for each invocation in a test, which takes less time itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


@pytest.fixture
def started_children(monkeypatch):
    """Each child of `verify` is started as users start it."""
    monkeypatch.setattr(child, "subprocess", subprocess)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what lives as long as the tests out of the collector: it would visit a million objects, again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
