"""The group of commands: what an interruption becomes, and how a warning is shown."""

import warnings

import pytest
import typer

from ckptmove.cli import guard
from ckptmove.io.outputs import LeftoversRemoved


def test_an_interrupted_command_is_aborted(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(guard.TyperGroup, "invoke", interrupted)
    with pytest.raises(typer.Abort):
        guard.GuardedGroup(name="ckptmove").invoke(None)


def test_a_warning_is_one_line_without_the_line_of_code(monkeypatch, capsys):
    def warned(*_):
        warnings.warn("a temporary file was removed", LeftoversRemoved, stacklevel=1)

    monkeypatch.setattr(guard.TyperGroup, "main", warned)
    with pytest.raises(SystemExit) as ended:
        guard.GuardedGroup(name="ckptmove").main(["inspect"])
    assert ended.value.code == 0
    assert capsys.readouterr().err == "warning: a temporary file was removed\n"
