"""R302, which nearly every checkpoint has, is printed on request, and once for several checkpoints."""

from __future__ import annotations

import json
import shutil

import pytest

from ckptmove.cli.render.renderer import VerifyAnswer, printed
from ckptmove.cli.selection import selection
from ckptmove.model import Finding, Severity
from ckptmove.proof.evidence import Verdict
from ckptmove.proof.request import VerifyRequest

NOTE = "R302"


@pytest.mark.parametrize("words", [(), ("--format", "github"), ("--quiet",), ("--select", "D,R,K", "--ignore", NOTE)])
def test_it_is_not_printed(say, words) -> None:
    said = say("inspect", "run.pth", "--ignore", "D103", "--report", "markdown=report.md", *words)
    assert said.code == 0
    assert NOTE not in said.out


@pytest.mark.parametrize("words", [("-v",), ("--strict",), ("--select", NOTE), ("--select", "R"), ("--json",)])
def test_it_is_printed_on_request(say, words) -> None:
    assert NOTE in say("inspect", "run.pth", *words).out


def test_reports_follow_the_same_rule(say, bench) -> None:
    for words, is_printed in ((), False), (("-v",), True):
        say("inspect", "run.pth", "--report", "markdown=report.md", "--report", "json=report.json", *words)
        assert (NOTE in (bench / "report.md").read_text()) is is_printed
        codes = {one["code"] for one in json.loads((bench / "report.json").read_text())["checkpoints"][0]["findings"]}
        assert NOTE in codes


def test_several_checkpoints_have_it_once(say, bench) -> None:
    for name in ("a.pth", "b.pth"):
        shutil.copy(bench / "run.pth", bench / name)
    lines = [line for line in say("inspect", "run.pth", "a.pth", "b.pth", "-v").out.splitlines() if NOTE in line]
    assert [line.partition(" in ")[0] for line in lines[1:]] == [f"{NOTE}: also"]
    assert "2 checkpoints" in lines[1]
    quiet = say("inspect", "run.pth", "a.pth", "b.pth", "--quiet", "--select", NOTE).out
    assert quiet.count(NOTE) == 3


def test_verify_follows_the_same_rule() -> None:
    finding = Finding(NOTE, "resume-incomplete", Severity.INFO, "no scheduler")
    result = Verdict(path="a", target="cpu", mode="cpu", passed=True, proven=True, checks=(), findings=(finding,))
    for everything, expected in (False, ()), (True, (finding,)):
        chosen = selection((), (), everything=everything)
        answer = VerifyAnswer(VerifyRequest("a"), result, unprinted=chosen.unprinted)
        assert printed(answer).result.findings == expected
