from __future__ import annotations

import signal

import pytest

from ckptmove.api.failures import Failure
from ckptmove.cli import ended
from ckptmove.cli.ranks import on_ranks, own_rank, require_one
from ckptmove.cli.render.verification import outcome
from ckptmove.cli.signals import Terminated
from ckptmove.errors import UsageError
from ckptmove.io.remote.address import Address
from ckptmove.proof.evidence import CheckResult, RanksOfRun, Verdict
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.mesh.errors import RankFailed


class Rank:
    """A rank whose run was ended by torchrun."""

    is_first = True
    failure = {"kind": "usage", "message": "bad", "hint": "", "path": None, "exit_code": 2}  # noqa: RUF012

    def __init__(self, killed=None, code=None):
        self.killed, self.code = killed, code

    def verify(self, request, progress, stage):
        raise Terminated(signal.SIGTERM)

    def killed_rank(self):
        return self.killed

    def finish(self, code):
        return self.code


def test_without_torchrun_there_is_no_rank(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert own_rank() is None


@pytest.mark.parametrize(
    ("requests", "fix"),
    [
        ([VerifyRequest("a"), VerifyRequest("b")], False),
        ([VerifyRequest(Address("s3://bucket/a"))], False),
        ([VerifyRequest("a", download="b")], False),
        ([VerifyRequest("a")], True),
    ],
)
def test_what_ranks_do_not_verify(requests, fix):
    with pytest.raises(UsageError):
        require_one(requests, fix=fix)


def test_a_signal_after_a_rank_was_killed_names_that():
    killed = RankFailed(3, "its process was killed", path=None, hint="", exit_code=1)
    with pytest.raises(RankFailed, match="rank 3"):
        on_ranks(Rank(killed))(VerifyRequest("a"), progress=None, stage=None)
    with pytest.raises(Terminated):
        on_ranks(Rank())(VerifyRequest("a"), progress=None, stage=None)


@pytest.mark.parametrize(("agreed", "code"), [(None, 2), (5, 5)])
def test_an_error_that_the_first_rank_does_not_hear_is_written(monkeypatch, capsys, agreed, code):
    monkeypatch.setattr(ended, "own_rank", lambda: Rank(code=agreed))
    assert ended.agreed(3, ["verify", "x"]) == code
    assert capsys.readouterr().err == ("error: bad\n" if agreed is None else "")


def test_another_command_does_not_wait_for_ranks(monkeypatch):
    monkeypatch.setattr(ended, "own_rank", lambda: Rank(code=7))
    assert ended.agreed(3, ["inspect", "x"]) == 3


@pytest.mark.parametrize("is_first", [True, False])
def test_only_the_first_rank_writes_an_error(monkeypatch, capsys, is_first):
    rank = Rank()
    monkeypatch.setattr(rank, "reports", lambda failure: is_first, raising=False)
    monkeypatch.setattr(ended, "own_rank", lambda: rank)
    assert ended._report(Failure(**Rank.failure), ["verify", "x"]) == 2
    assert bool(capsys.readouterr().err) == is_first


def verdict(*, passed=True, parity="passed", exact=True, **run):
    check = CheckResult("parity", parity, "a detail", (("exact", exact),))
    checks = (CheckResult("keys", "passed" if passed else "failed", ""), check)
    return Verdict(
        path="x", target="cpu", mode="cpu", passed=passed, proven=passed and parity == "passed", checks=checks,
        findings=(), run=RanksOfRun(ranks=4, **run),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "ranks", "proof"),
    [
        (verdict(shape=(2, 2), dims=("dp", "tp"), saved_by=4), "4 ranks (2\u00d72: dp, tp), saved by 4", "bit for bit"),
        (verdict(saved_by=8, resharded=True, exact=False), "4 ranks, resharded from 8 to 4", "within tolerance"),
        (verdict(shape=(4,), parity="skipped"), "4 ranks (4)", "a detail"),
        (verdict(passed=False, saved_by=4, resharded=True), "4 ranks, saved by 4, resharded", ""),
    ],
)
def test_the_verdict_of_ranks(result, ranks, proof):
    line = outcome(result)
    assert line.startswith(f"{'passed' if result.passed else 'failed'}, cpu, {ranks}")
    assert line.endswith(proof)
