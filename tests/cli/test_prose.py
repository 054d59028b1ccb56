"""Prose in the JSON has no control characters, names are exact, and no fix runs a file by itself."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from ckptmove.cli.app import app
from ckptmove.findings.catalogue import CATALOGUE
from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of

NAME = "a\x1b[31m\n\x9b\u202eX"
DENSE = b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE


def archive(tensor=DENSE, name=NAME, before=b""):
    return archive_of(b"\x80\x02}(" + before + text(name) + tensor + b"u.", {"0": bytes(16), "1": bytes(4096)})


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ask(data, *words):
        (tmp_path / "x.pt").write_bytes(data)
        result = CliRunner().invoke(app, [words[0], "x.pt", *words[1:], "--json"])
        return result.exit_code, json.loads(result.stdout)

    return ask


def test_messages_are_printable(asked) -> None:
    code, document = asked(archive(DENSE.replace(b"K\x04\x85", b"N")), "inspect")
    assert code == 3
    assert document["error"]["message"].isprintable()
    assert document["error"]["hint"].isprintable()
    assert r"a\x1b[31m\x0a\x9b\u202eX" in document["error"]["message"]


def test_names_are_exact_and_findings_printable(asked) -> None:
    evil = b"c" + b"posix\nsys\x1btem\n"
    _, document = asked(archive(before=text("evil") + evil), "inspect")
    [checkpoint] = document["checkpoints"]
    assert checkpoint["tensors"][0]["name"] == NAME
    assert "posix.sys\x1btem" in {one["name"] for one in checkpoint["globals"]}
    [found] = [one for one in checkpoint["findings"] if one["code"] == "S702"]
    assert found["where"] == ["posix.sys\x1btem"]
    for one in checkpoint["findings"]:
        assert (one["message"] + one["fix"]).isprintable()


@pytest.mark.parametrize(
    "words", [["inspect"], ["convert", "--to", "cuda:0"], ["verify"], ["inspect", "-q"], ["diff", "run.pth"]]
)
def test_a_lack_of_memory_is_refused(asked, monkeypatch, words) -> None:
    def fail(*_args, **_options):
        raise MemoryError

    monkeypatch.setattr("ckptmove.pickles.machine._walk", fail)
    code, document = asked(archive(), *words)
    assert code == document["exit_code"] == 4
    assert document["error"]["kind"] == "out-of-memory"
    assert document["error"]["path"]
    assert document["error"]["hint"]


@pytest.mark.parametrize(
    ("command", "function", "path"),
    [
        ("inspect", "ckptmove.api.inspection.inspect_checkpoint", True),
        ("convert", "ckptmove.api.functions.convert_checkpoint", False),
    ],
    ids=["of several paths", "of one"],
)
def test_a_lack_of_memory_beside_the_file_is_refused(asked, monkeypatch, command, function, path) -> None:
    def fail(*_args, **_options):
        raise MemoryError

    monkeypatch.setattr(function, fail)
    code, document = asked(archive(), command, *(["--to", "cuda:0"] if command == "convert" else []))
    assert code == document["exit_code"] == 4
    assert document["error"]["kind"] == "out-of-memory"
    assert bool(document["error"]["path"]) is path


LOAD = re.compile(r"torch\.load\((?:[^()]|\([^()]*\))*\)")


@pytest.mark.parametrize("code", CATALOGUE)
def test_no_rule_advises_an_unsafe_load(code) -> None:
    for call in LOAD.findall(CATALOGUE[code].mend):
        assert "weights_only=True" in call


@pytest.mark.parametrize("payload", [b"", b"capp\nConfig\n)R", b"cos\nsystem\n(" + text("x") + b"tR"], ids=repr)
def test_no_fix_runs_the_file_unasked(asked, payload) -> None:
    """Dead bytes, a wrapper's prefix and stray bytes all have a line of Python as their fix."""
    before = text("evil") + payload if payload else b""
    names = {}
    for data in (archive(name="module.w", before=before), archive(name="module.w", before=before) + b"stray"):
        _, document = asked(data, "inspect")
        for one in document["checkpoints"][0]["findings"] if document["checkpoints"] else ():
            names[one["code"]] = one["fix"]
    assert {"F804", "K601"} <= names.keys()
    for code, fix in names.items():
        for call in LOAD.findall(fix):
            assert "weights_only=True" in call, (code, fix)
