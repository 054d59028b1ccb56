"""Several checkpoints in one command: every one is told of, and how many are as they should be."""

from __future__ import annotations

import pytest

from ckptmove.cli.batch import Batch, conclude
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.streams import Format, Output
from ckptmove.errors import LimitExceeded


@pytest.mark.parametrize(
    ("good", "unproven", "line"),
    [
        (3, 0, "3 of 3 passed"),
        (2, 0, "2 of 3 passed"),
        (2, 1, "1 of 3 passed, 1 not proven"),
        (3, 3, "0 of 3 passed, 3 not proven"),
    ],
)
def test_what_is_not_proven_is_counted_apart(capsys, good, unproven, line) -> None:
    batch = Batch(code=YES if good == 3 else NO, failures=(), good=good, is_cut_short=False)
    for quiet in (True, False):
        conclude(batch, 3, "passed", Output(Format.HUMAN, quiet=quiet), unproven=unproven)
        assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(("good", "unproven", "color"), [(3, 0, 32), (3, 1, 33), (2, 1, 31)])
def test_the_last_line_has_the_color_of_the_worst(monkeypatch, capsys, good, unproven, color) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    batch = Batch(code=YES, failures=(), good=good, is_cut_short=False)
    conclude(batch, 3, "passed", Output(Format.HUMAN), unproven=unproven)
    assert capsys.readouterr().out.startswith(f"\x1b[1;{color}m")


def test_a_line_for_each_checkpoint_has_one_for_what_cannot_be_read(say, monkeypatch) -> None:
    words = ("inspect", "run.pth", "none.pth", "--select", "N")
    assert say(*words, "-q").out == "run.pth: no findings\nnone.pth: unreadable\n1 of 2 fine\n"
    assert say("inspect", "none.pth", "-q").out == ""
    assert "unreadable" not in say(*words).out

    def refuse(*_args, **_options):
        raise LimitExceeded("operations", limit=1, actual=2)

    monkeypatch.setattr("ckptmove.api.inspect", refuse)
    assert say(*words, "-q").out == "run.pth: refused\nnone.pth: refused\n0 of 2 fine\n"


def test_an_error_stands_apart_from_the_report_before_it(say) -> None:
    hint = "hint: check the path; relative ones start at the working directory\n"
    assert say("inspect", "run.pth", "none.pth", "--ignore", "D103").err.endswith(
        f"next: ckptmove verify run.pth\n\nerror: none.pth: no such file\n{hint}"
    )
    assert say("inspect", "none.pth", "run.pth", "-q").err == f"error: none.pth: no such file\n{hint}"
