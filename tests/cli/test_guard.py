"""The group of commands: what an interruption becomes."""

import pytest
import typer

from ckptmove.cli import guard


def test_an_interrupted_command_is_aborted(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(guard.TyperGroup, "invoke", interrupted)
    with pytest.raises(typer.Abort):
        guard.GuardedGroup(name="ckptmove").invoke(None)
