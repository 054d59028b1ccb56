"""Fixtures of all tests: forked children with torch, cached commands of the app, and a small heap for the collector."""

from __future__ import annotations

import compileall
import functools
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.testing
import untraced
import warm_worker
from hypothesis import HealthCheck, settings

import ckptmove
from ckptmove.proof.processes import child
from ckptmove.training import run

# Before torch is imported: tests run in a process for each processor, and their tensors are small. Waiting for a second
# thread can take a hundred times as long as the operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
#: Folders of tests that cross all rooms. The tests of a room reach each line of it without them, and coverage would
#: double their time.
UNMEASURED = ("crash/", "e2e/")
#: Tests that take milliseconds: the quick set has each of their parameters, and one of those of other tests.
CHEAP = (
    "api/",
    "checkpoint/",
    "cli/render/",
    "cli/test_config.py",
    "cli/test_failures.py",
    "cli/test_prose.py",
    "comparison/",
    "contract/",
    "conversion/",
    "findings/",
    "formats/",
    "io/",
    "lazy/",
    "opening/",
    "pickles/",
    "simulation/test_mps.py",
    "torch_facts/",
    "training/case/test_options.py",
    "training/case/test_parts.py",
    "training/code/",
)
# How long an example takes depends on what else the machine does.
settings.register_profile("any_machine", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("any_machine"), max_examples=25, derandomize=True)


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="run the quick set: no slow test, and few parameters")


def pytest_configure(config):
    """Compile the package once: where Python writes no bytecode, each process that a test starts would compile it."""
    settings.load_profile("quick" if config.getoption("--quick") else "any_machine")
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(ckptmove.__file__).parent, quiet=2)


def pytest_collection_finish():
    """Make cuda the first simulated device of this process: C++ code means the first one by the index 0.

    Which tests a process runs, and in which order, depends on the others.
    """
    simulated = sys.modules.get("ckptmove.simulation.device")
    if simulated is not None:
        simulated.SimulatedDevice("cuda:0")


@pytest.fixture(scope="session", autouse=True)
def forked_children():
    """Fork the children of `verify` from a process that has imported torch, if the system forks safely."""
    servers = warm_worker.Servers()
    forking = SimpleNamespace(Popen=servers.start, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(child, "subprocess", forking)
            patch.setattr(run, "can_fork", lambda: False)  # a fork of this process would import torch
        yield
    servers.stop()


@pytest.fixture(scope="session", autouse=True)
def built_commands():
    """Build the commands of an app once, not for each invocation: Typer takes longer than the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.testing._get_command))
        yield


def pytest_collection_modifyitems(config, items):
    """Mark the tests of `UNMEASURED` folders; with `--quick`, choose the tests of the quick set."""
    for item in items:
        if is_in(UNMEASURED, item):
            item.add_marker(pytest.mark.unmeasured)
    if config.getoption("--quick"):
        first = {}
        for item in items:
            if not item.get_closest_marker("slow"):
                first.setdefault(item.nodeid if is_in(CHEAP, item) else item.nodeid.partition("[")[0], item)
        chosen = [*first.values()]
        config.hook.pytest_deselected(items=[*set(items).difference(chosen)])
        items[:] = chosen


def is_in(folders, item):
    return item.nodeid.removeprefix("tests/").startswith(folders)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Trace no line of a test that is marked with `unmeasured`, nor of a process that it starts.

    Other threads stay measured, in contrast to the `no_cover` of pytest-cov: coverage.py does not return to a thread
    that it has stopped to measure.
    """
    trace = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("unmeasured"):
            for name in os.environ.keys() - untraced.environment().keys():
                patch.delenv(name)
            sys.settrace(None)
        try:
            return (yield)
        finally:
            sys.settrace(trace)


@pytest.fixture
def started_children(monkeypatch):
    """Start each child of `verify` as in production."""
    monkeypatch.setattr(child, "subprocess", subprocess)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the rewritten asserts, and exclude a million permanent objects from garbage collection.

    Rewriting takes most of a collection, and each worker of xdist collects. Code of the tests themselves is not kept:
    a file that is written twice in a second would be the first one.
    """
    gc.disable()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Freeze what earlier modules left: the check of a script walks over all other objects."""
    gc.collect()
    gc.freeze()
