"""Several checkpoints in one command: each is reported, with a count of passes."""

from __future__ import annotations

import re

import pytest

from ckptmove.cli.render.human import HumanRenderer
from ckptmove.cli.render.renderer import Summary
from ckptmove.cli.streams import Output
from ckptmove.errors import LimitExceeded


@pytest.mark.parametrize(
    ("good", "unproven", "line"),
    [
        (3, 0, "3 of 3 passed"),
        (2, 0, "2 of 3 passed"),
        (2, 1, "2 of 3 passed, 1 of them not proven"),
        (3, 3, "3 of 3 passed, 3 of them not proven"),
    ],
)
def test_what_is_not_proven_is_told(capsys, good, unproven, line) -> None:
    summary = Summary("verify", 0 if good == 3 else 1, checkpoints=3, good=good, unproven=unproven)
    for quiet in (True, False):
        HumanRenderer(Output(quiet=quiet)).finish(summary)
        assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.unmeasured
def test_what_fails_for_want_of_proof_is_not_taken_off_those_that_passed(say, bench) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, bench / "weights.pth")
    say("convert", "run.pth", "--to", "cpu")
    for words, line in (((), "2 of 2 passed, 1 of them not proven"), (("--strict",), "1 of 2 passed")):
        assert say("verify", "-q", *words, "run.cpu.pth", "weights.pth").out.splitlines()[-1] == line


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("words", "level", "code", "doubt"),
    [
        ((), "warning", 0, "but not proven to resume: "),
        (("--strict",), "error", 1, "but not proven to resume (a failure with --strict): "),
    ],
)
def test_the_verdict_says_what_fails_it(say, bench, monkeypatch, words, level, code, doubt) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, bench / "weights.pth")
    for way in ((), ("-q",), ("--format", "github")):
        said = say("verify", *words, *way, "weights.pth")
        assert said.code == code
        assert f"passed, cpu, {doubt}" in said.out.splitlines()[-1]
        assert said.out.splitlines()[-1].startswith(f"::{level} ") == ("github" in way)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    color = 31 if words else 33
    assert say("verify", *words, "weights.pth").out.splitlines()[-1].startswith(f"\x1b[1;{color}m")


@pytest.mark.parametrize(("good", "unproven", "color"), [(3, 0, 32), (3, 1, 33), (2, 1, 31)])
def test_the_last_line_has_the_color_of_the_worst(monkeypatch, capsys, good, unproven, color) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    HumanRenderer(Output()).finish(Summary("verify", 0, checkpoints=3, good=good, unproven=unproven))
    assert capsys.readouterr().out.startswith(f"\x1b[1;{color}m")


def test_a_line_for_each_checkpoint_has_one_for_what_cannot_be_read(say, monkeypatch) -> None:
    words = ("inspect", "run.pth", "none.pth", "--select", "N")
    first, second, last = say(*words, "-q").out.splitlines()
    assert (first.partition(":")[0], second, last) == ("run.pth", "none.pth: unreadable", "1 of 2 fine")
    assert say("inspect", "none.pth", "-q").out == ""
    assert "unreadable" not in say(*words).out

    def refuse(*_args, **_options):
        raise LimitExceeded("operations", limit=1, actual=2)

    monkeypatch.setattr("ckptmove.api.inspection.inspect_checkpoint", refuse)
    assert say(*words, "-q").out == "run.pth: refused\nnone.pth: refused\n0 of 2 fine\n"


def test_an_error_stands_apart_from_the_report_before_it(say) -> None:
    first, empty, *error = say("inspect", "run.pth", "none.pth", "--ignore", "D103").err.splitlines()
    assert (first.partition(":")[0], empty) == ("next", "")
    assert say("inspect", "none.pth", "run.pth", "-q").err.splitlines() == error
    assert [line.partition(": ")[0] for line in error] == ["error", "hint"]
    assert error[0].startswith("error: none.pth: ")


def test_verify_counts_what_it_could_not_prove(say, bench, simulates) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"weight": torch.ones(2)}, bench / "weights.pth")
    say("convert", "weights.pth", "--to", "cuda:3")
    out = say("verify", "weights.cuda3.pth", "run.pth", "dragged.pth", "--to", "cuda:3").out
    assert out.splitlines()[-2] == ""
    assert [int(word) for word in re.findall(r"\d+", out.splitlines()[-1])] == [2, 3, 1]
