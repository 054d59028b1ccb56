from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack, contextmanager

import pytest

from ckptmove.proof.checks import Offenders
from ckptmove.proof.processes import group
from ckptmove.proof.processes.child import ONE_THREAD, Ending, child
from ckptmove.proof.processes.group import Leader, start_others
from ckptmove.proof.processes.messages import Message
from ckptmove.proof.request import VerifyRequest

SENDS = """
import json
print(json.dumps({{"joined": {{"count": {rank}, "first": [[{rank}, "x" * 2**20]]}}}}))
print(json.dumps({{"joined": {{"count": 1, "first": []}}}}))
"""


@pytest.fixture
def ended(monkeypatch):
    """How this process would have ended."""
    found = []
    monkeypatch.setattr(group, "_end_as", lambda ending: found.append((ending.code, ending.errors)))
    return found


@pytest.fixture
def led():
    """Call a function with a leader of processes that run some programs; returns the other messages of these."""

    def led(work, *programs):
        messages = []
        with ExitStack() as stack:
            others = [stack.enter_context(child([sys.executable, "-c", one], "{}")) for one in programs]
            with Leader(others, messages.append) as leader:
                work(leader)
        return messages

    return led


def test_long_results_of_several_processes(led, ended):
    found = [Offenders(), Offenders()]

    def join(leader):
        assert leader.size == 4
        for tally in found:
            leader.join(tally)

    led(join, *(SENDS.format(rank=rank) for rank in (3, 1, 2)))
    assert [one.count for one in found] == [6, 3]
    assert [index for index, _ in found[0].first] == [1, 2, 3]
    assert ended == []


def lose(leader):
    with pytest.raises(ChildProcessError):
        leader.join(Offenders())


def test_a_process_that_fails_ends_the_first_one_in_the_same_way(led, ended):
    led(lose, "raise MemoryError('no room')")
    led(lose, "import os\nprint('{\"gath', end='', flush=True)\nos.kill(os.getpid(), 9)")
    (code, errors), killed = ended
    assert (code, errors.splitlines()[-1]) == (1, "MemoryError: no room")
    assert killed == (-signal.SIGKILL, "")


def test_messages_of_a_process_that_has_no_results(led, ended):
    assert led(lose, 'print(\'{"imports": "a:B"}\\n{"refusal": "no such class"}\')') == [
        Message(imports="a:B"),
        Message(refusal="no such class"),
    ]
    assert ended == []


def test_a_process_that_is_left_may_be_killed(led, ended):
    def fail(_leader):
        raise ValueError

    with pytest.raises(ValueError):
        led(fail, "import time; time.sleep(600)")
    assert ended == []


@pytest.mark.parametrize("code", [7, -signal.SIGTERM])
def test_this_process_ends_as_another(monkeypatch, capsys, code):
    killed = []

    def leave(number):
        raise SystemExit(number)

    monkeypatch.setattr(signal, "raise_signal", killed.append)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit) as left:
        group._end_as(Ending(code, "", "why\n"))
    assert capsys.readouterr().err == "why\n"
    assert (left.value.code, killed) == ((7, []) if code > 0 else (1, [signal.SIGTERM]))


@pytest.fixture
def started(monkeypatch):
    """The requests to processes that were started and to those that still run."""
    begun, running = [], []

    @contextmanager
    def start(_command, request, variables):
        rank = json.loads(request).get("rank", 0)
        begun.append((rank, variables))
        if rank == 3:
            raise OSError(12, "Cannot allocate memory")
        running.append(rank)
        yield rank
        running.remove(rank)

    monkeypatch.setattr(group, "child", start)
    monkeypatch.setattr(group, "can_fork", lambda: False)
    return begun, running


def test_processes_are_started_where_none_is_forked(started):
    begun, running = started
    with ExitStack() as stack:
        request = VerifyRequest(path="c.pt", jobs=3)
        assert start_others(request, stack) == (request, [1, 2])
        assert running == [1, 2]
        start_others(request._replace(jobs=2, optimizer="own:Class"), stack)
    assert begun == [(1, ONE_THREAD), (2, ONE_THREAD), (1, None)]
    assert running == []


def test_one_process_works_if_the_system_has_no_room_for_all(started):
    request = VerifyRequest(path="c.pt", jobs=4)
    with ExitStack() as stack:
        assert start_others(request, stack) == (request._replace(jobs=1), [])
        assert started[1] == []
