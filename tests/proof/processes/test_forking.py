"""Forks of a process that has neither threads nor torch. A program of its own makes them, with an empty torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptmove.proof.processes import forking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")

PROGRAM = """
import gc, json, os, signal, sys, threading, time, types
from contextlib import ExitStack
from dataclasses import dataclass, field
from ckptmove.proof.checks import Tally, passed
from ckptmove.proof.processes import child as module
from ckptmove.proof.processes import forking
from ckptmove.proof.processes.child import forked
from ckptmove.proof.processes.forking import can_fork, fork
from ckptmove.proof.processes.group import Leader, Follower, start_others
from ckptmove.proof.processes.messages import Message
from ckptmove.proof.request import VerifyRequest

sys.modules["torch"] = types.ModuleType("torch")
signal.signal(signal.SIGTERM, lambda *_: None)
found = {}


@dataclass
class Ended(Tally):
    ranks: list[int] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    text: str = ""


def emit(message):
    sys.stdout.write(message.line())
    sys.stdout.flush()


def answer(**figures):
    emit(Message(check=passed("restore", "fine", **figures)))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def ask(name, work, **options):
    with forked(lambda: work) as started:
        answers = started.collect(wanted=("restore",), **options)
    check = answers.checks["restore"]
    found[name] = [check.status, check.detail, dict(check.evidence), answers.torch_failure]
    return started.process


def state():
    answer(
        handler=signal.getsignal(signal.SIGTERM),
        blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        group=os.getpgrp() == os.getpid(),
        collects=gc.isenabled() and gc.get_freeze_count() > 0,
        numpy=os.environ["OPENBLAS_NUM_THREADS"],
        forks=can_fork(),
    )


def fail():
    raise ValueError("seventeen")


def shared(broken=None, sleeps=False):
    def work():
        with ExitStack() as stack:
            request, others = start_others(VerifyRequest(path="", jobs=3), stack)
            if request.rank:
                group = Follower(request, emit)
                group.join(Ended([request.rank], [os.getpid()], [group.size], "x" * 2**17))
                if sleeps:
                    time.sleep(600)
                if request.rank == broken:
                    sys.stderr.write("no room\\n")
                    sys.stderr.flush()
                    os.abort()
                return
            with Leader(others, emit) as group:
                ended = Ended()
                group.join(ended)
                if sleeps:
                    with open(sys.argv[1] + ".new", "w") as file:
                        print(*ended.pids, file=file)
                    os.rename(file.name, sys.argv[1])
                if broken or sleeps:
                    time.sleep(600)
            answer(size=group.size, ranks=ended.ranks, sizes=ended.sizes)
    return work


sys.stdout.write("not written yet;")
before = descriptors()
ask("state", state)
ask("abort", os.abort)
ask("exception", fail)
late = ask("timeout", lambda: time.sleep(600), timeout=0.2)
found["left"] = late.wait()
ask("shared", shared())
ask("broken", shared(broken=2))
with forked(lambda: shared(sleeps=True)):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
found["in time"] = ask("enough", answer, timeout=600).wait()
sys.modules["torch"] = None
ask("no torch", answer)
sys.modules["torch"], module.ctypes.CDLL = os, lambda _: os
ask("no mallopt", answer)
os.fork = lambda: os.close(-1)
for leads in (True, False):
    try:
        fork(leads=leads)
    except OSError:
        found[f"no room {leads}"] = True
found["descriptors"] = descriptors() - before
found["blocked"] = len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
found["forks with a thread"] = can_fork()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pids = tmp_path_factory.mktemp("forks") / "pids"
    command = [sys.executable, "-c", PROGRAM, str(pids)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert told.returncode == 0, told.stderr
    text, _, document = told.stdout.partition(";")
    assert text == "not written yet"
    return {**json.loads(document), "pids": [int(word) for word in pids.read_text().split()]}


def test_a_fork_is_a_process_of_its_own(found):
    status, _, evidence, _ = found["state"]
    assert status == "passed"
    assert evidence == {
        "handler": signal.SIG_DFL,
        "blocked": 0,
        "group": True,
        "collects": True,
        "numpy": os.environ.get("OPENBLAS_NUM_THREADS", "1"),
        "forks": True,
    }


def test_the_end_of_a_fork_is_a_failed_check(found):
    assert found["abort"][2] == {"exit_code": -signal.SIGABRT}
    assert found["exception"][2] == {"exit_code": 1}
    assert found["exception"][1].endswith("ValueError: seventeen")
    assert found["timeout"][2] == {"timeout": 0.2}
    assert found["left"] == -signal.SIGKILL
    assert (found["in time"], found["enough"][0]) == (0, "passed")


def test_a_torch_that_cannot_be_imported(found):
    assert "torch" in found["no torch"][3]
    assert found["no mallopt"][0] == "passed"


def test_a_fork_that_fails_leaves_nothing(found):
    assert found["no room True"]
    assert found["no room False"]
    assert (found["descriptors"], found["blocked"]) == (0, 0)


def test_the_first_process_gathers_the_results_of_its_forks(found):
    status, _, evidence, _ = found["shared"]
    assert (status, evidence) == ("passed", {"size": 3, "ranks": [1, 2], "sizes": [3, 3]})


def test_the_first_process_ends_as_a_fork_of_it(found):
    assert found["broken"][2] == {"exit_code": -signal.SIGABRT}
    assert found["broken"][1].endswith("SIGABRT: no room")


def test_all_forks_end_with_the_first_process(found):
    assert len(found["pids"]) == 2
    while any(Path(f"/proc/{pid}/environ").exists() for pid in found["pids"]):
        time.sleep(0.05)


@pytest.mark.unmeasured
def test_no_fork_with_a_thread_or_without_a_standard_stream_or_elsewhere(found, monkeypatch):
    assert found["forks with a thread"] is False
    monkeypatch.setattr(forking, "_THREADS", Path("/proc/self/task") / str(os.getpid()) / "ns")
    monkeypatch.setattr("sys.__stdout__", None)
    assert not forking.can_fork()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not forking.can_fork()


EXIT_FUNCTION = """
import atexit, os, sys, types
from ckptmove.proof.processes.child import forked

sys.modules["torch"] = types.ModuleType("torch")
atexit.register(lambda: open("ran", "a").close())
with forked(lambda: lambda: None) as started:
    assert started.process.wait() == 0
os._exit(0)
"""


def test_a_fork_does_not_run_the_exit_functions_of_its_parent(tmp_path):
    subprocess.run([sys.executable, "-c", EXIT_FUNCTION], cwd=tmp_path, check=True)
    assert not (tmp_path / "ran").exists()
