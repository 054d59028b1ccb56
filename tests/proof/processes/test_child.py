from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ckptmove.api.failures import failure_of
from ckptmove.proof.checks import CHILD_CHECKS, failed, passed, skipped
from ckptmove.proof.codec import dumps, loads
from ckptmove.proof.errors import ChildKilled
from ckptmove.proof.processes import child as module
from ckptmove.proof.processes.child import child, end_of, worker_command
from ckptmove.proof.processes.messages import Message
from ckptmove.proof.processes.pipes import Pipes
from ckptmove.proof.request import VerifyRequest


def answers_of(code):
    with child([sys.executable, "-c", code], "{}") as started:
        return started.collect()


def statuses(answers):
    return [answers.checks[name].status for name in CHILD_CHECKS]


ONE = f"print({Message(check=passed('restore', 'fine', tensors=1)).line()!r}, flush=True)"


def test_an_abort_is_a_failed_check_that_names_the_signal():
    answers = answers_of("import os; os.abort()")
    assert statuses(answers) == ["failed", *["skipped"] * 4]
    assert answers.checks["restore"].detail == "the process that runs torch was ended by SIGABRT"
    assert answers.checks["step"].detail == "not reached: the process that runs this check has ended"


def test_an_abort_by_a_hook_in_backward_is_told_in_words():
    said = "terminate called without an active exception"
    answers = answers_of(f"import os, sys; print({said!r}, file=sys.stderr, flush=True); os.abort()")
    assert answers.checks["restore"].detail.startswith("one of your backward hooks raised an exception")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_child_killed_from_outside_says_nothing_of_the_checkpoint(name):
    answers = answers_of(f"import os, signal\n{ONE}\nos.kill(os.getpid(), signal.{name})")
    with pytest.raises(ChildKilled) as caught:
        answers.require_usable()
    assert caught.value.message == f"the process that runs torch was ended by {name}"
    assert failure_of(caught.value).exit_code == 70


def test_a_child_killed_after_its_last_answer_counts():
    with child([sys.executable, "-c", f"import os, signal\n{ONE}\nos.kill(os.getpid(), signal.SIGKILL)"], "{}") as one:
        answers = one.collect(wanted=("restore",))
    answers.require_usable()
    assert answers.checks["restore"].status == "passed"


def test_what_was_answered_before_a_crash_counts():
    answers = answers_of(
        f"import os, sys\nprint('{{\"mode\": \"real\"}}')\n{ONE}\nsys.stderr.write('oh no\\n')\nos.abort()"
    )
    assert statuses(answers) == ["passed", "failed", *["skipped"] * 3]
    assert answers.mode == "real"
    assert answers.checks["restore"] == passed("restore", "fine", tensors=1)
    assert answers.checks["numbers"].evidence == (("exit_code", -signal.SIGABRT),)
    assert answers.checks["numbers"].detail.endswith(": oh no")


def test_a_case_is_answered_for_last():
    with child([sys.executable, "-c", ONE], "{}") as started:
        answers = started.collect(wanted=("restore", "case"))
    assert answers.checks["case"].status == "failed"
    assert answers.checks["case"].evidence == (("exit_code", 0),)


def test_a_case_that_is_none_is_a_mistake_of_the_request_and_no_failure():
    with child([sys.executable, "-c", 'print(\'{"unusable": "it returns 3"}\')'], "{}") as started:
        answers = started.collect(wanted=("restore", "case"))
    assert answers.unusable == "it returns 3"
    assert not answers.checks


def test_a_signal_without_a_name():
    answers = answers_of("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 3)")
    assert "signal 37" in answers.checks["restore"].detail


def test_an_exception_is_a_failed_check_with_its_last_line():
    answers = answers_of("raise ValueError('seventeen')")
    assert answers.checks["restore"].detail.endswith(" 1: ValueError: seventeen")


@pytest.mark.parametrize("said", ["", "garbage", "[]", "17", "{}", '{"check": {}}', '{"check": 3}', '{"finding": {}}'])
def test_garbage_is_a_failed_check(said):
    answers = answers_of(f"print({said!r})")
    assert answers.checks["restore"].detail == (
        f"the process that runs torch ended without an answer; it printed {said + chr(10)!r}"
    )
    assert answers.mode is None
    assert answers.findings == []


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        ("raise OSError('libcudart.so.13: no such file')", "OSError: libcudart.so.13: no such file"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "the process that runs torch was ended by SIGILL"),
    ],
)
def test_a_child_that_ends_while_it_imports_torch(end, failure):
    answers = answers_of(f'print(\'{{"torch": "importing"}}\', flush=True)\n{end}')
    assert answers.torch_failure == failure
    assert answers_of(f'print(\'{{"torch": "imported"}}\', flush=True)\n{end}').torch_failure == ""


def test_a_child_may_say_more_than_a_pipe_holds():
    answers = answers_of("import sys; sys.stderr.write('x' * 1_000_000 + '\\nlast\\n'); sys.exit(3)")
    assert answers.checks["restore"].detail.endswith("code 3: last")


def test_every_stage_is_told(make):
    stages = []
    request = dumps(VerifyRequest(path=make("SGD"), to="cpu"))
    with child(worker_command(), request) as started:
        started.collect(stages.append)
    told = list(dict.fromkeys(stages))
    assert told == ["importing torch", "restore", "numbers", "step", "parity", "fresh", "finishing"]


@pytest.fixture
def ended(make, tmp_path):
    """Answers and exit code of a worker that runs a file of the user."""

    def ended(body):
        (tmp_path / "waits.py").write_text(body)
        request = dumps(VerifyRequest(path=make("SGD"), to="cpu", case=f"{tmp_path / 'waits.py'}:case"))
        with child(worker_command(), request) as started:
            answers = started.collect(timeout=120)
            return answers, started.process.returncode

    return ended


BEGUN = "import threading, time\nthreading.Thread(target=time.sleep, args=(3000,)).start()\n"


@pytest.mark.slow
def test_nobody_waits_for_a_thread_of_the_users(ended):
    answers, code = ended(f"{BEGUN}case = None\n")
    assert (code, "case" in answers.unusable) == (0, True)


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "asyncio.CancelledError"])
def test_nobody_waits_for_a_thread_where_what_ends_the_case_is_no_error(ended, raised):
    answers, code = ended(f"import asyncio\n{BEGUN}def case():\n    raise {raised}\n")
    assert code == 0
    assert answers.checks["case"].status == "failed"
    assert answers.torch_failure == ""


@pytest.mark.usefixtures("started_children")
def test_the_last_line_of_what_ended_the_worker_is_told():
    with child([*worker_command()], "no request") as started:
        answers = started.collect()
    assert " code 1: json." in answers.checks["restore"].detail


@pytest.mark.slow
@pytest.mark.unmeasured
def test_what_the_user_has_left_to_do_at_the_end_is_done(ended, tmp_path):
    kept = f"import tempfile\nkept = tempfile.TemporaryDirectory(dir={str(tmp_path)!r}, prefix='left-')\n"
    ended(f"{kept}def case():\n    raise KeyboardInterrupt\n")
    ended(
        "import atexit, pathlib, time\n"
        "atexit.register(time.sleep, 3000)\n"
        f"atexit.register(pathlib.Path({str(tmp_path / 'done')!r}).touch)\ncase = None\n"
    )
    assert (tmp_path / "done").exists()
    assert not list(tmp_path.glob("left-*"))


#: Starts a process that inherits the pipes, prints its id, and continues.
WITH_A_WORKER = """
import os, subprocess, sys, time
own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(PATH, "w").write(f"{os.getpid()} {own.pid}")
"""


def is_running(number):
    """Whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition):
    while not condition():
        time.sleep(0.05)


@pytest.fixture
def with_a_worker(tmp_path):
    """A program with a child process; the ids of both, after it has printed them."""
    told = tmp_path / "told"

    def pids():
        wait_until(lambda: told.exists() and told.read_text().count(" "))
        return [int(number) for number in told.read_text().split()]

    return f"PATH = {str(told)!r}\n{WITH_A_WORKER}", pids


def test_the_child_is_killed_with_all_that_it_started_when_the_parent_is_interrupted(with_a_worker):
    program, pids = with_a_worker
    started = []

    def interrupted():
        with child([sys.executable, "-c", f"{program}\ntime.sleep(600)"], "{}"):
            started.extend(pids())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) == 2
    wait_until(lambda: not any(map(is_running, started)))


class Interrupted(BaseException):
    pass


def test_an_interrupted_parent_may_be_done_before_the_thread_that_waits_for_its_child(monkeypatch):
    raised = []
    waiting = []
    outlast = module.Child._outlast

    def hear_late(started, timeout):
        waiting.append(threading.current_thread())
        started.process.wait()
        time.sleep(0.5)
        return outlast(started, timeout)

    def interrupt(*_):
        raise Interrupted

    monkeypatch.setattr(module.Child, "_outlast", hear_late)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Interrupted):
            answers_of("import time; time.sleep(600)")
    finally:
        signal.signal(signal.SIGALRM, before)
    wait_until(lambda: waiting)
    waiting[0].join()
    assert raised == []


def test_a_child_that_takes_too_long_is_a_failed_check(with_a_worker):
    program, pids = with_a_worker
    code = f'print(\'{{"mode": "cpu"}}\')\n{ONE}\n{program}\ntime.sleep(600)'
    with child([sys.executable, "-c", code], "{}") as started:
        left = pids()
        answers = started.collect(timeout=0.25)
    assert statuses(answers) == ["passed", "failed", *["skipped"] * 3]
    assert answers.checks["numbers"] == failed("numbers", "took longer than 0.25 s (--timeout)", timeout=0.25)
    assert answers.checks["fresh"].status == "skipped"
    wait_until(lambda: not any(map(is_running, left)))


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        ('{"torch": "importing"}', "took longer than 0.5 s (--timeout), before torch was imported"),
        ('{"imports": "pkg.mod:CLASS"}', "took longer than 0.5 s (--timeout)"),
    ],
)
def test_what_is_imported_too_long_is_not_broken(said, detail):
    code = f"import time; print({said!r}, flush=True); time.sleep(600)"
    with child([sys.executable, "-c", code], "{}") as started:
        wait_until(started.process.stdout.buffer.peek)
        answers = started.collect(timeout=0.5)
    assert (answers.torch_failure, answers.refusal) == ("", "")
    assert answers.checks["restore"].detail == detail


def test_a_child_that_has_answered_in_time_may_be_slow_to_end():
    with child([sys.executable, "-c", f"{ONE}\nimport time; time.sleep(600)"], "{}") as started:
        wait_until(started.process.stdout.buffer.peek)
        answers = started.collect(wanted=("restore",), timeout=0.1)
    assert answers.checks == {"restore": passed("restore", "fine", tensors=1)}


def test_a_child_that_ends_in_time_is_not_late():
    with child([sys.executable, "-c", ONE], "{}") as started:
        assert started.collect(wanted=("restore",), timeout=600).checks["restore"].status == "passed"


def test_what_a_child_leaves_behind_does_not_keep_its_parent_waiting(with_a_worker):
    program, pids = with_a_worker
    answers = answers_of(f"{program}\nos.abort()")
    assert answers.checks["restore"].evidence == (("exit_code", -signal.SIGABRT),)
    wait_until(lambda: not any(map(is_running, pids())))


def test_a_system_without_process_groups(monkeypatch):
    monkeypatch.delattr(os, "killpg")
    with child([sys.executable, "-c", "import time; time.sleep(600)"], "{}") as started:
        pass
    assert started.process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.unmeasured
def test_the_worker_ends_with_its_parent_and_with_all_that_it_started(make, with_a_worker, tmp_path):
    program, pids = with_a_worker
    (tmp_path / "slow.py").write_text(f"{program}\ndef case():\n    time.sleep(600)")
    request = dumps(VerifyRequest(path=make("SGD"), to="cpu", case=f"{tmp_path / 'slow.py'}:case"))
    parent = (
        "from ckptmove.proof.processes.child import child, worker_command\n"
        f"with child(worker_command(), {request!r}) as started: started.collect()"
    )
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        started = pids()
        process.kill()
    wait_until(lambda: not any(map(is_running, started)))


def test_the_worker_watches_its_standard_input(monkeypatch):
    ours, theirs = os.pipe()
    killed = []
    monkeypatch.setattr(os, "getpgrp", os.getpid)
    monkeypatch.setattr(os, "killpg", lambda *ends: killed.append(ends))
    kept = os.dup(0), os.dup(1)
    os.dup2(ours, 0)
    try:
        pipes = Pipes()
        assert os.read(0, 1) == b""  # code that reads stdin must not wait
        os.write(theirs, b"one\n")
        assert pipes.lines.get() == "one"
        assert killed == []
        os.close(theirs)
        wait_until(lambda: killed)
        pipes._answers.close()
    finally:
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(ours)
    assert killed == [(os.getpgrp(), signal.SIGKILL)]


@pytest.mark.slow
def test_the_worker_answers_on_standard_output_alone_and_imports_nothing_from_the_folder_at_hand(make, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(9)")
    request = dumps(VerifyRequest(path=make("SGD"), to="cpu"))
    told = subprocess.run([*worker_command(), request], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(told.stdout.splitlines()) == 8
    with child(worker_command(), request) as started:
        assert statuses(started.collect()) == ["passed", "passed", "passed", "passed", "skipped"]


def test_requests_survive_the_journey():
    request = VerifyRequest(
        path="a\udcff.pt",
        to="mps",
        against="b",
        optimizer="SGD",
        require_device=True,
        seed=3,
        ignore=("O208",),
        keep=("a",),
        devices=2,
        timeout=1.5,
    )
    assert loads(VerifyRequest, os.fsdecode(os.fsencode(dumps(request)))) == request


def test_the_three_outcomes():
    assert [check.status for check in (passed("a", "b"), failed("a", "b"), skipped("a", "b", n=1))] == [
        "passed",
        "failed",
        "skipped",
    ]


def test_a_stream_that_an_interruption_has_closed_has_no_end():
    stream = io.StringIO("text")
    stream.close()
    assert end_of(stream) == ""
