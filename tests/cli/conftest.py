"""Fixtures to run commands in a folder with two checkpoints, without a terminal and without configuration."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
from moto_server import moto, sent  # noqa: F401  # fixtures
from typer.testing import CliRunner

import ckptmove.api
from ckptmove.cli.app import app, main
from ckptmove.cli.outcome import PROGRAM

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
SCHEMA = json.loads((Path(ckptmove.api.__file__).parent / "schema.json").read_text(encoding="utf-8"))


def closed(schema):
    """The schema without additional keys; the shipped one allows them, for later versions."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {"additionalProperties": False} if "properties" in schema and "required" in schema else {}
    return {key: closed(part) for key, part in schema.items()} | rest


@pytest.fixture
def simulates():
    """Skip a test with a step on a simulated device if torch is missing or cannot simulate one."""
    pytest.importorskip("torch")
    from ckptmove.simulation.device import unavailable_reason

    reason = unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


VALIDATOR = jsonschema.Draft202012Validator(closed(SCHEMA))


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def next(self) -> list[str]:
        """The words of the suggested next command; empty if there is none."""
        lines = [line for line in self.err.splitlines() if line.startswith("next: ")]
        assert len(lines) <= 1
        program, *words = shlex.split(lines[0].removeprefix("next: ")) if lines else [PROGRAM]
        assert program == PROGRAM
        return words

    @property
    def only_next(self) -> list[str]:
        """The words of the suggested next command, if stderr has nothing else."""
        assert self.err.count("\n") == bool(self.err)
        assert self.err.startswith("next: ") or not self.err
        return self.next


@pytest.fixture(autouse=True)
def bench(tmp_path, monkeypatch):
    """A folder with ``run.pth``, healthy on cuda:3, and ``dragged.pth``, with steps and RNG states on cuda:0."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(SAMPLES / "adamw-cuda3.pth", tmp_path / "run.pth")
    shutil.copy(SAMPLES / "map-location-dragged-all.pth", tmp_path / "dragged.pth")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def validator():
    """The closed schema."""
    return VALIDATOR


@pytest.fixture
def say():
    """Run a command; return its exit code, stdout and stderr. It may only raise SystemExit."""

    def say(*words):
        result = CliRunner().invoke(app, list(map(str, words)))
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return Said(result.exit_code, result.stdout, result.stderr)

    return say


@pytest.fixture
def ckptmove(monkeypatch, capsys):
    """Run a command like a process; return its exit code, stdout and stderr."""

    def ckptmove(*arguments):
        monkeypatch.setattr("sys.argv", ["ckptmove", *arguments])
        with pytest.raises(SystemExit) as raised:
            main()
        out, err = capsys.readouterr()
        return raised.value.code, out, err

    return ckptmove


@pytest.fixture
def ask(say):
    """Run a command with ``--json``; return its document, validated by the schema."""

    def ask(*words):
        said = say(*words, "--json")
        document = json.loads(said.out)
        VALIDATOR.validate(document)
        assert said.out.isascii()
        assert said.out.count("\n") == 1
        assert document["exit_code"] == said.code
        assert document["ok"] is (said.code == 0)
        assert document["error"] == next(iter(document["errors"]), None)
        return document

    return ask


@pytest.fixture
def check(say, ask):
    """Check all four renderings of a call. Each is a text; for JSON, it can be a part of the document."""

    def check(*words, code, human, quiet, github, document):
        for extra, expected in (((), human), (("--quiet",), quiet), (("--format", "github"), github)):
            said = say(*words, *extra)
            assert said.out == expected
            assert said.code == code
        answer = ask(*words)
        assert {key: answer[key] for key in document} == document

    return check
