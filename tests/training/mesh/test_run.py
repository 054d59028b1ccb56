"""The processes of the ranks without torch: agreement, one report, one exit code. Their children are scripted."""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from distributed_checkpoints import Distributed
from torchrun import SUPPORT

from ckptmove.errors import CaseUnusable, CkptMoveError, UsageError
from ckptmove.proof.checks import CHILD_CHECKS, MESH_CHECKS, failed, passed
from ckptmove.proof.codec import to_plain
from ckptmove.proof.errors import TorchBroken
from ckptmove.proof.processes.child import Child
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.mesh import meeting
from ckptmove.training.mesh.errors import RankFailed
from ckptmove.training.mesh.launch import Launch
from ckptmove.training.mesh.run import Rank

ENDED = {"check": to_plain(passed("rank", "ended"))}
PASSED = [{"check": to_plain(passed(name, "equal", exact=True))} for name in MESH_CHECKS]
FACTS = {"run": {"ranks": 3, "shape": [2], "dims": ["dp"], "saved_by": 3, "resharded": True}}
MODE = {"mode": "cpu"}


def fault(text, check="case", *, lost=False):
    return {"check": to_plain(failed("rank", text, check=check, lost=lost))}


class Run:
    """A run of some ranks, each in a thread."""

    def __init__(self, folder, checkpoint):
        self.folder, self.checkpoint = folder, checkpoint
        self.codes: dict[int, object] = {}

    def launch(self, rank, size, local_size=None):
        return Launch(rank, size, rank, local_size or size, "127.0.0.1", 1, "test/0", has_store=True)

    def rank(self, number, messages, size, **options):
        (self.folder / f"{number}.json").write_text(json.dumps(messages))
        command = [sys.executable, "-S", str(SUPPORT / "mesh_child.py"), str(self.folder), str(number)]
        return Rank(self.launch(number, size, **options), command)

    def request(self, **options):
        return VerifyRequest(str(self.checkpoint), **{"to": "cpu", "case": "train.py:case", **options})

    def start(self, *scripts, requests=(), **options):
        """Run all ranks to their end. Returns the verdict of the first, or its error."""
        ranks = [self.rank(number, script, len(scripts), **options) for number, script in enumerate(scripts)]
        requests = requests or [self.request()] * len(ranks)
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = [pool.submit(self._run, rank, request) for rank, request in zip(ranks, requests, strict=True)]
        outcomes = [one.result() for one in found]
        self.codes = {number: code for number, (_, code) in enumerate(outcomes)}
        return outcomes[0][0]

    def _run(self, rank, request):
        found, code = None, 0
        try:
            found = rank.verify(request) if rank.is_first else rank.attend(request)
            code = 0 if found is None or found.passed else 1
        except CkptMoveError as error:
            found, code = error, 2
            rank.reports({"message": error.message, "path": error.path, "hint": "look", "exit_code": 3})
        finally:
            code = rank.finish(code)
        return found, code


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 60.0)
    (tmp_path / "train.py").write_text("def case(device): ...\n")
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path, Distributed.save(tmp_path / "ckpt", {"w": torch.ones(3)}))


def status(result):
    return {check.name: check.status for check in result.checks}


def test_one_report_of_all_ranks(ranks):
    result = ranks.start([MODE, FACTS, *PASSED, ENDED], [MODE, ENDED], [MODE, ENDED])
    assert result.passed
    assert result.proven
    assert {*status(result).values()} == {"passed", "skipped"}
    assert str(result.run) == "3 ranks (2: dp), saved by 3, resharded"
    assert ranks.codes == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize(("options", "target"), [({}, "cuda"), ({"case": None}, "cuda:0")])
def test_a_device_is_named_without_index_if_each_rank_has_its_own(ranks, options, target):
    request = ranks.request(to="cuda:0", **options)
    names = CHILD_CHECKS if request.case is None else MESH_CHECKS
    made = [{"check": to_plain(passed(name, "equal"))} for name in names]
    script = [{"mode": "real"}, *made, ENDED]
    assert ranks.start(script, script, requests=[request] * 2).target == target


def test_agents_on_several_machines_listen_on_all_addresses(ranks):
    result = ranks.start([MODE, *PASSED, ENDED], [MODE, ENDED], local_size=1)
    assert result.passed
    assert str(result.run) == "2 ranks"


def test_without_two_protocols_the_first_rank_listens_on_one(ranks, monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    assert ranks.start([MODE, *PASSED, ENDED], [MODE, ENDED], local_size=1).passed


@pytest.mark.parametrize(("check", "evidence"), [("parity", {}), ("fresh", {"anew": 2})])
def test_a_step_that_is_not_compared_proves_nothing(ranks, check, evidence):
    skipped = {"status": "skipped", "evidence": [*evidence.items()]}
    made = [{"check": one["check"] | (skipped if one["check"]["name"] == check else {})} for one in PASSED]
    result = ranks.start([MODE, *made, ENDED], [MODE, ENDED])
    assert result.passed
    assert not result.proven


@pytest.mark.parametrize(
    ("script", "check", "text"),
    [
        ([MODE, fault("ValueError: no data")], "case", "rank 1: ValueError: no data"),
        ([MODE, "crash"], "options", "rank 1: the process that runs torch was ended by SIGABRT"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named(ranks, script, check, text):
    lost = fault("RuntimeError: Connection closed by peer", "options", lost=True)
    result = ranks.start([MODE, FACTS, *PASSED[:2], lost], script, [MODE, lost])
    failing = [one for one in result.checks if one.status == "failed"]
    assert [one.name for one in failing] == [check]
    assert [*failing[0].failures] == [text]
    assert [(one.rank, one.check) for one in result.run.faults] == [(1, check)]
    assert ranks.codes == {0: 1, 1: 1, 2: 1}


def test_a_rank_killed_from_outside_is_no_answer(ranks):
    found = ranks.start([MODE, fault("RuntimeError: Connection closed", "options", lost=True)], [MODE, "die"])
    assert type(found) is RankFailed
    assert (found.message, found.exit_code) == ("rank 1: the process that runs torch was ended by SIGKILL", 70)


def test_if_all_have_lost_another_all_are_named(ranks):
    lost = fault("RuntimeError: Connection closed by peer", "step", lost=True)
    result = ranks.start([MODE, *PASSED[:3], lost], [MODE, lost])
    assert {one.rank for one in result.run.faults} == {0, 1}
    assert status(result)["step"] == "failed"


def test_a_rank_that_fails_after_its_checks_fails_the_last(ranks):
    result = ranks.start([MODE, *PASSED, ENDED], [MODE, fault("RuntimeError: at the end", "")])
    assert status(result)["case"] == "failed"


def test_faults_of_the_checks_are_kept(ranks):
    broken = {"check": to_plain(failed("restore", "rank 0: it differs"))}
    facts = {"run": {"ranks": 2, "faults": [{"rank": 0, "check": "restore", "fault": "it differs"}]}}
    result = ranks.start([MODE, PASSED[0], broken, facts, *PASSED[2:], ENDED], [MODE, ENDED])
    assert [(one.rank, one.check, one.fault) for one in result.run.faults] == [(0, "restore", "it differs")]
    assert ranks.codes == {0: 1, 1: 1}


@pytest.mark.slow
def test_the_timeout_names_the_rank_that_the_others_wait_for(ranks):
    def late(*, waits):
        return {"late": {"check": "case", "where": " at train.py:7", "waits": waits}}

    result = ranks.start(
        [MODE, PASSED[0], late(waits=True), "hang"],
        [MODE, late(waits=False), "hang"],
        [MODE, late(waits=True), "hang"],
        requests=[ranks.request(timeout=2.0)] * 3,
    )
    assert [one.fault for one in result.run.faults] == ["took longer than 2 s (--timeout) at train.py:7"]
    assert [one.rank for one in result.run.faults] == [1]
    assert status(result)["case"] == "failed"
    assert ranks.codes == {0: 1, 1: 1, 2: 1}


def test_a_rank_that_hangs_after_another_failed_is_ended(ranks, monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.3)
    result = ranks.start([MODE, "hang"], [MODE, fault("ValueError: no data")], [MODE, "hang"])
    assert [tuple(one) for one in result.run.faults] == [(1, "case", "ValueError: no data")]
    assert ranks.codes == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize(("rank", "text"), [(0, "a list"), (1, "rank 1: a list")])
@pytest.mark.parametrize(("kind", "error"), [("unusable", CaseUnusable), ("refusal", UsageError)])
def test_a_case_that_no_rank_can_use(ranks, kind, error, rank, text, monkeypatch):
    sent, send = [], meeting.Guest.send
    monkeypatch.setattr(meeting.Guest, "send", lambda guest, one: send(guest, one) or sent.append(one))
    scripts = [[MODE, ENDED], [MODE, ENDED]]
    scripts[rank] = [MODE, {kind: "a list"}]
    found = ranks.start(*scripts)
    assert type(found) is error
    assert found.message.endswith(text)
    assert ranks.codes == {0: 2, 1: 2}
    assert [one.has_failed for one in sent] == [rank == 1]  # then rank 0 waits no longer


def test_broken_torch(ranks):
    found = ranks.start([{"torch": "importing"}], [MODE, ENDED])
    assert type(found) is TorchBroken


def test_ranks_with_different_options(ranks):
    requests = [ranks.request(), ranks.request(seed=1)]
    found = ranks.start([ENDED], [ENDED], requests=requests)
    assert type(found) is UsageError
    assert "seed is 1 on rank 1, and 0 on rank 0" in found.message
    assert ranks.codes == {0: 2, 1: 2}


def test_a_rank_that_cannot_read_the_checkpoint(ranks):
    found = ranks.start([ENDED], [ENDED], requests=[ranks.request(), ranks.request()._replace(path="nothing")])
    assert type(found) is RankFailed
    assert (found.path, found.hint, found.exit_code) == ("nothing", "look", 3)
    assert ranks.codes == {0: 2, 1: 2}


def test_no_rank_can_read_the_checkpoint(ranks):
    found = ranks.start([ENDED], [ENDED], requests=[ranks.request()._replace(path="nothing")] * 2)
    assert found.path == "nothing"
    assert ranks.codes == {0: 2, 1: 2}


def test_a_rank_that_fails_after_the_start(ranks, monkeypatch):
    """As one that torchrun ends by a signal."""
    collect = Child.collect

    def interrupted(started, stage, wanted, timeout):
        answers = collect(started, stage, wanted, timeout)
        if started.process.args[-2] == "1":
            raise UsageError("ended by a signal")
        return answers

    monkeypatch.setattr(Child, "collect", interrupted)
    result = ranks.start([MODE, *PASSED, ENDED], [MODE, ENDED])
    assert [tuple(one) for one in result.run.faults] == [(1, "case", "ended by a signal")]


@pytest.mark.parametrize(
    "options",
    [
        {"script": "train.py", "case": None},
        {"against": "other"},
        {"sample": 1},
        {"optimizer": "AdamW"},
        {"to": "cuda:1"},
    ],
)
def test_options_that_several_ranks_cannot_have(ranks, options):
    found = ranks.start([ENDED], [ENDED], requests=[ranks.request()._replace(**options)] * 2)
    assert type(found) is UsageError
    assert ranks.codes == {0: 2, 1: 2}


def test_a_rank_that_cannot_reach_the_first_keeps_its_error(ranks):
    rank = ranks.rank(1, ["no store"], 2)
    with pytest.raises(TorchBroken):
        rank.attend(ranks.request())
    assert not rank.reports({"message": "unreadable"})
    assert not rank.reports({"message": "another"})
    assert rank.failure == {"message": "unreadable"}
    assert rank.finish(3) is None


def test_a_rank_to_which_the_port_is_closed(ranks):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        (ranks.folder / "address").write_text(f"127.0.0.1 {closed.getsockname()[1]} token")
    rank = ranks.rank(1, [ENDED], 2)
    with pytest.raises(RankFailed, match="rank 0") as caught:
        rank.attend(ranks.request())
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert not rank.reports({"message": "unreached"})
    assert rank.finish(3) is None
    failed_before = ranks.rank(1, [ENDED], 2)
    assert not failed_before.reports({"message": "unreadable"})
    assert failed_before.finish(3) is None
    assert failed_before.failure == {"message": "unreadable"}


def test_a_child_that_died_before_it_had_the_address(ranks, monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.3)

    def give(started, line):
        raise BrokenPipeError

    monkeypatch.setattr(Child, "give", give)
    assert ranks.rank(0, [ENDED], 2).finish(1) == 1


def test_a_rank_without_the_first_has_no_exit_code(ranks):
    first, second = ranks.rank(0, [ENDED], 2), ranks.rank(1, [ENDED], 2)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(second.attend, ranks.request())
        started = first._join()
        assert first._host._token not in " ".join(started.process.args)
        first._host.wait_for_start()
        first._host._connections[1].shutdown(socket.SHUT_RDWR)
        waiting.result()
    assert second.finish(0) is None
    assert first.finish(1) == 1


class TestHost:
    def test_a_stranger_is_not_heard(self, monkeypatch):
        monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.3)
        host = meeting.Host(Launch(0, 2, 0, 2, "127.0.0.1", 1, "test/0", has_store=True))
        place, port, _ = host.address.split(" ")
        for line in (b"GET / HTTP/1.1\r\n", b'{"token": "wrong", "rank": 1}\n', b"[]\n"):
            with socket.create_connection((place, int(port))) as stranger:
                stranger.sendall(line)
        assert host.killed() == []
        host.dismiss(0)
        assert host.hellos == {}

    def test_a_rank_that_is_killed(self, monkeypatch):
        monkeypatch.setattr(meeting, "GRACE_SECONDS", 60.0)
        launch = Launch(0, 3, 0, 3, "127.0.0.1", 1, "test/0", has_store=True)
        rank = Rank(launch, ["none"])
        host = rank._host
        place, port, token = host.address.split(" ")
        with socket.create_connection((place, int(port))) as connection:
            hello = {"token": token, "rank": 2, "request": to_plain(VerifyRequest("x"))}
            connection.sendall(json.dumps(hello).encode() + b"\n")
        assert host.killed() == [2]
        assert rank.killed_rank().message.startswith("rank 2")
        host.wait_for_start()  # does not wait for rank 1: one has ended
        with pytest.raises(RankFailed, match="rank 2"):
            rank._agree(host, VerifyRequest("x"))

    def test_a_rank_that_does_not_start(self, monkeypatch):
        monkeypatch.setattr(meeting, "START_SECONDS", 0.1)
        rank = Rank(Launch(0, 2, 0, 2, "127.0.0.1", 1, "test/0", has_store=True), ["none"])
        with pytest.raises(RankFailed, match="rank 1") as caught:
            rank._agree(rank._host, VerifyRequest("x"))
        assert caught.value.hint

    @pytest.mark.parametrize("line", [b"", b"x" * 2**21])
    def test_a_first_message_is_bounded(self, monkeypatch, line):
        monkeypatch.setattr(meeting, "_TOKEN_SECONDS", 60.0 if line else 0.1)
        host = meeting.Host(Launch(0, 2, 0, 2, "127.0.0.1", 1, "test/0", has_store=True))
        place, port, _ = host.address.split(" ")
        with socket.create_connection((place, int(port)), timeout=30) as stranger, suppress(ConnectionError):
            stranger.sendall(line)
            assert stranger.recv(1) == b""
        assert host.hellos == {}

    def test_if_all_have_ended_none_is_waited_for(self, monkeypatch):
        monkeypatch.setattr(meeting, "GRACE_SECONDS", 60.0)
        host = meeting.Host(Launch(0, 2, 0, 2, "127.0.0.1", 1, "test/0", has_store=True))
        place, port, token = host.address.split(" ")
        with socket.create_connection((place, int(port))) as connection:
            for message in ({"token": token, "rank": 1}, {}):
                connection.sendall(json.dumps(message).encode() + b"\n")
            host.wait_for_end()
        monkeypatch.setattr(host, "_take", None)
        assert host.killed() == []

    def test_another_rank_names_none(self):
        assert Rank(Launch(1, 2, 1, 2, "127.0.0.1", 1, "test/0", has_store=True), ["none"]).killed_rank() is None
