from __future__ import annotations

import io
import os
import sys
import time

import pytest

from ckptmove.cli import progress
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.streams import open_closed_streams, page_of


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class OldTerminal(Terminal):
    encoding = "ascii"


def test_a_terminal_has_columns_and_colors(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setenv("TERM", "xterm-256color")
    page = page_of(Terminal())
    assert (page.columns, page.color, page.unicode) == (77, True, True)
    assert page_of(OldTerminal()).unicode is False
    monkeypatch.setenv("NO_COLOR", "1")
    assert page_of(Terminal()).color is False


def test_a_pipe_has_neither_unless_colors_are_forced(monkeypatch) -> None:
    page = page_of(io.StringIO())
    assert (page.columns, page.color) == (None, False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    page = page_of(io.StringIO())
    assert (page.columns, page.color) == (None, True)


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.05)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def copy(*, seconds: float, wanted: bool = True) -> None:
    with ProgressBar(wanted=wanted) as bar:
        bar(1, 3 * 2**20)
        time.sleep(seconds)
        bar(2**20, 3 * 2**20)
        bar(3 * 2**20, 3 * 2**20)


def test_a_stage_takes_the_place_of_bytes(monkeypatch, patience) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    import sys

    with ProgressBar(wanted=True) as bar:
        bar.stage("too early")
        time.sleep(0.1)
        bar(2**20, 3 * 2**20)
        bar.stage("importing torch")
        assert "MiB" not in sys.stderr.getvalue().rpartition("importing torch")[2]
        bar.stage("restore")
    said = sys.stderr.getvalue()
    assert "too early" not in said
    assert said.index("1.0/3.0 MiB") < said.index("importing torch") < said.index("restore")
    assert said.endswith("\x1b[2K")


def test_long_work_shows_bytes_and_cleans_up(monkeypatch, patience) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    copy(seconds=0.1)
    import sys

    said = sys.stderr.getvalue()
    assert "3.0/3.0 MiB" in said
    assert said.endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("stream", "seconds", "wanted"),
    [(Terminal, 0, True), (Terminal, 0.1, False), (io.StringIO, 0.1, True)],
    ids=["short", "not wanted", "no terminal"],
)
def test_other_work_shows_nothing(monkeypatch, patience, stream, seconds, wanted) -> None:
    monkeypatch.setattr("sys.stderr", stream())
    copy(seconds=seconds, wanted=wanted)
    import sys

    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_the_null_device(monkeypatch, name):
    monkeypatch.setattr(sys, name, None)
    open_closed_streams()
    with getattr(sys, name) as opened:
        assert (opened.name, opened.readable()) == (os.devnull, name == "stdin")
