"""Results of the API, and the documents that they share with the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

import ckptmove
import ckptmove.api
from ckptmove.cli.app import app

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"
SCHEMA = json.loads((Path(ckptmove.api.__file__).parent / "schema.json").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SAMPLES / "adamw-cuda3.pth", "run.pth")
    shutil.copy(SAMPLES / "optimizer-left-on-cpu.pth", "left.pth")
    shutil.copy(SAMPLES / "map-location-dragged-all.pth", "dragged.pth")


def documents(result, *words: str):
    """The document of a result, which must be valid, and that of the command."""
    own = result.to_dict()
    jsonschema.Draft202012Validator(SCHEMA).validate(own)
    printed = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    for document in (own, printed):
        for one in (document, *document.get("conversions", ())):
            one.pop("seconds", None)
    return json.loads(json.dumps(own)), printed


@pytest.mark.parametrize("path", ["run.pth", "left.pth", "dragged.pth"])
@pytest.mark.parametrize("expect", [None, "cpu", "cuda:3"])
def test_the_document_of_an_inspection_is_that_of_the_command(path, expect) -> None:
    result = ckptmove.inspect(path, expect=expect)
    own, printed = documents(result, "inspect", path, *(["--expect", expect] if expect else []))
    assert own == printed
    assert bool(result) is result.ok is printed["ok"]


def test_the_document_of_an_inspection_has_the_errors_of_its_files() -> None:
    folder = Path("folder")
    folder.mkdir()
    shutil.copy("run.pth", folder / "a.pth")
    (folder / "b.pth").write_bytes(Path("run.pth").read_bytes()[:-200])
    result = ckptmove.inspect("folder", keep_going=True)
    own, printed = documents(result, "inspect", "folder")
    assert own == printed
    assert own["exit_code"] == 3
    assert not result


def test_the_document_of_a_conversion_is_that_of_the_command() -> None:
    result = ckptmove.convert("run.pth", to="cpu", dry_run=True)
    own, printed = documents(result, "convert", "run.pth", "--to", "cpu", "--dry-run")
    assert own == printed
    assert result


@pytest.mark.unmeasured
@pytest.mark.parametrize(("path", "ok"), [("run.pth", True), ("left.pth", True), ("dragged.pth", False)])
def test_the_document_of_a_verdict_is_that_of_the_command(path, ok) -> None:
    result = ckptmove.verify(path)
    own, printed = documents(result, "verify", path)
    times = [check["evidence"].pop("seconds", None) for one in (own, printed) for check in one["results"][0]["checks"]]
    assert len(times) > 4
    assert own == printed
    assert bool(result) is result.ok is own["ok"] is ok


@pytest.mark.parametrize(("other", "ok"), [("run.pth", True), ("left.pth", False)])
def test_the_document_of_a_comparison_is_that_of_the_command(other, ok) -> None:
    result = ckptmove.diff("run.pth", other)
    own, printed = documents(result, "diff", "run.pth", other)
    assert own == printed
    assert bool(result) is result.ok is own["ok"] is ok


def test_the_devices_of_an_inspection() -> None:
    assert ckptmove.inspect("run.pth").devices == ("cuda:3", "cpu")


def test_the_parameters_of_an_inspection() -> None:
    weights = ckptmove.load("run.pth", "cpu")["model"]
    assert ckptmove.inspect("run.pth").num_parameters == sum(weight.numel() for weight in weights.values())


def test_a_notebook_shows_a_small_table() -> None:
    shown = ckptmove.inspect("left.pth")._repr_html_()
    assert "D102" in shown
    assert shown.count("<tr>") == 1 + len(ckptmove.inspect("left.pth").findings)
    from dataclasses import replace

    clean = replace(ckptmove.inspect("run.pth"), findings=())._repr_html_()
    assert "cuda:3" in clean
    converted = ckptmove.convert("run.pth", to="cpu", dry_run=True)
    assert converted._repr_html_().count("<tr>") == 1 + 10 + 1
    assert "step" in ckptmove.verify("run.pth")._repr_html_()
    assert "<table>" not in ckptmove.diff("run.pth", "run.pth")._repr_html_()
    assert "device" in ckptmove.diff("run.pth", "left.pth")._repr_html_()


def test_text_of_a_file_stays_text() -> None:
    from ckptmove.api.tables import html_table

    shown = html_table("<b>", ["<i>"], [["<script>alert(1)</script>", "\x1b[2J", "a" * 1000]])
    assert "<script>" not in shown
    assert "<i>" not in shown
    assert "\x1b" not in shown
    assert len(shown) < 500
