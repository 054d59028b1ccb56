"""``--report KIND=FILE``: files next to the report on stdout."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ckptmove.cli import completion, verify_command
from ckptmove.cli.render import sarif
from ckptmove.cli.render.formats import DOCUMENTS
from ckptmove.cli.render.report_files import open_document
from ckptmove.errors import StdoutFailed
from ckptmove.proof.evidence import FixedFile, Verdict
from ckptmove.proof.request import VerifyRequest

SAMPLES = Path(__file__).parents[3] / "sample_ckpts"

COMMANDS = {
    "inspect": ("inspect", "run.pth", "dragged.pth"),
    "convert": ("convert", "run.pth", "--to", "cpu", "--force"),
    "verify": ("verify", "run.pth", "--to", "cpu"),
    "diff": ("diff", "run.pth", "dragged.pth"),
}


@pytest.fixture(params=DOCUMENTS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def verdict():
    """A real verdict, which fails."""
    pytest.importorskip("torch")
    return verify_command.verify_checkpoint(VerifyRequest(str(SAMPLES / "adamw-cuda3.pth"), to="cpu"))


@pytest.mark.unmeasured
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_every_kind(say, bench, command, kind, request, monkeypatch) -> None:
    words = COMMANDS[command]
    if command == "verify":
        result = request.getfixturevalue("verdict")
        monkeypatch.setattr(verify_command, "verify_checkpoint", lambda *_request, **_callbacks: result)
    alone = say(*words)
    (bench / "report").write_bytes(open_document(f"{kind}=x")[1].head)  # an earlier report
    with_report = say(*words, "--report", f"{kind}=report")
    assert (with_report.code, with_report.out.count("\n")) == (alone.code, alone.out.count("\n"))
    head = open_document(f"{kind}=x")[1].head
    written = (bench / "report").read_bytes()
    assert written.startswith(head)
    assert len(written) > len(head)


def test_several_reports_of_one_command(say, bench) -> None:
    said = say("inspect", "dragged.pth", "--json", *(f"--report={kind}={kind}.report" for kind in DOCUMENTS))
    assert said.code == 1
    assert said.out == (bench / "json.report").read_text()
    assert {path.name for path in bench.glob("*.report")} == {f"{kind}.report" for kind in DOCUMENTS}


def test_the_file_of_json_is_what_is_printed_with_json(say, ask, bench, validator) -> None:
    for words in (COMMANDS["convert"], COMMANDS["diff"], ("inspect", "run.pth", "none.pth")):
        document = ask(*words)
        said = say(*words, "--report", "json=report.json", "-q")
        assert said.code == document["exit_code"]
        written = json.loads((bench / "report.json").read_text())
        validator.validate(written)
        assert {**written, "seconds": 0, "conversions": []} == {**document, "seconds": 0, "conversions": []}


def test_a_skipped_conversion_is_reported(say, bench) -> None:
    words = ("convert", "run.pth", "--to", "cpu", "--skip-existing")
    say(*words)
    assert say(*words, "--report", "json=report.json").code == 0
    assert json.loads((bench / "report.json").read_text())["conversions"][0]["path"] == "run.pth"


@pytest.mark.parametrize("words", [("diff", "run.pth", "none.pth"), ("convert", "none.pth", "--to", "cpu")])
def test_an_error_that_ends_the_command_is_reported(ask, bench, words) -> None:
    document = ask(*words, "--report", "json=report.json", "--report", "junit=report.xml")
    assert json.loads((bench / "report.json").read_text()) == document
    assert document["error"]["kind"] == "missing-file"
    assert ET.parse(bench / "report.xml").getroot().find("testsuite/testcase/error").get("type") == "missing-file"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--report", "report.xml"), "KIND=FILE"),
        (("--report", "pdf=report.pdf"), "the kinds are json, "),
        (("--report", "json="), "names no file"),
        (("--report", "json=-"), "./-"),
    ],
)
def test_a_report_is_a_kind_and_a_file(ask, bench, words, message) -> None:
    before = sorted(bench.iterdir())
    error = ask("inspect", "run.pth", *words)["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)
    assert message in error["message"]
    assert sorted(bench.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "run.pth", "--report", "json=./run.pth"),
        ("inspect", "run.pth", "--report", "json=config.json"),
        ("inspect", "run.pth", "--report", "json=advisory.json"),
        ("inspect", "run.pth", "--report", "junit=pom.xml"),
        ("inspect", "run.pth", "--report", "sarif=lint.sarif"),
        ("inspect", "run.pth", "--report", "json=new", "--report", "junit=./new"),
        ("diff", "dragged.pth", "run.pth", "--report", "json=link.pth"),
        ("convert", "run.pth", "--to", "cpu", "--report", "json=run.cpu.pth"),
        ("convert", "run.pth", "--to", "cpu", "-o", "new.pth", "--report", "junit=new.pth"),
        ("convert", "run.pth", "--to", "cpu", "--output-dir", "new", "--report", "junit=new/run.pth"),
    ],
)
def test_a_report_replaces_no_other_file(ask, bench, words) -> None:
    (bench / "link.pth").symlink_to("run.pth")
    (bench / "config.json").write_text('{"hidden_size": 768}')
    (bench / "advisory.json").write_text('{"schema_version": "1.4.0"}')
    (bench / "pom.xml").write_text("<?xml version='1.0' encoding='utf-8'?>\n<project/>")
    driver = '"runs": [{"tool": {"driver": {"name": "lint"'
    (bench / "lint.sarif").write_text(f'{{"$schema": "{sarif.SCHEMA}", "version": "2.1.0", {driver}')
    before = {path: path.read_bytes() for path in bench.iterdir()}
    error = ask(*words)["error"]
    assert (error["kind"], error["exit_code"]) == ("output-is-no-report", 4)
    assert {path: path.read_bytes() for path in bench.iterdir()} == before


def test_a_file_that_cannot_be_written_any_more_does_not_cost_the_answer(ask, bench, monkeypatch) -> None:
    (bench / "gone").mkdir()
    monkeypatch.setattr("ckptmove.api.inspection.inspect_checkpoint", _then_remove(bench / "gone"))
    document = ask("inspect", "run.pth", "--report", "json=gone/a.json", "--report", "json=kept.json")
    assert (document["exit_code"], document["error"]["path"]) == (5, "gone/a.json")
    assert len(document["checkpoints"]) == 1
    assert json.loads((bench / "kept.json").read_text()) == document


def _then_remove(folder):
    from ckptmove.api import inspection as api

    real = api.inspect_checkpoint

    def inspect(*arguments):
        shutil.rmtree(folder)
        return real(*arguments)

    return inspect


def test_an_answer_that_cannot_be_printed_is_in_the_file(say, bench, monkeypatch) -> None:
    def refuse(*_arguments):
        raise StdoutFailed("No space left on device")

    monkeypatch.setattr("ckptmove.cli.render.human.HumanRenderer.inspect", refuse)
    assert say("inspect", "run.pth", "--report", "json=report.json").code == 5
    document = json.loads((bench / "report.json").read_text())
    assert (document["exit_code"], len(document["checkpoints"])) == (5, 1)
    assert document["error"]["kind"] == StdoutFailed.kind


def test_the_help_and_the_completion_name_every_kind(say) -> None:
    help_text = " ".join(say("inspect", "--help").out.split())
    assert f"Also write a report to a file: {', '.join(DOCUMENTS)}".rpartition(", ")[0] in help_text
    assert [word.removesuffix("=") for word in completion.report_kinds()] == list(DOCUMENTS)
    assert all(kind in help_text for kind in DOCUMENTS)


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_fix_is_reported_too(say, bench, monkeypatch, words) -> None:
    def fixed(_request, verified, renderer, *, dry_run):
        renderer.edits([FixedFile("train.py", 1, "--- train.py\n+++ train.py\n", None)])
        return verified(_request)

    result = Verdict(path="run.pth", target="cpu", mode="cpu", passed=True, proven=True, checks=(), findings=())
    monkeypatch.setattr(verify_command, "verify_checkpoint", lambda *_request, **_callbacks: result)
    monkeypatch.setattr(verify_command, "_fixed", fixed)
    said = say("verify", "run.pth", "--script", "train.py", "--fix", *words, "--report", "json=report.json")
    assert said.code == 0
    assert "+++ train.py" in said.err
    assert json.loads((bench / "report.json").read_text())["results"][0]["passed"]


def test_a_checkpoint_without_an_answer_has_its_line(say) -> None:
    assert "none.pth: unreadable" in say("inspect", "run.pth", "none.pth", "-q", "--report", "json=report.json").out


def test_undo_writes_no_report(ask, bench) -> None:
    assert ask("convert", "run.pth", "--undo", "--report", "json=report.json")["error"]["kind"] == "usage"
    assert not (bench / "report.json").exists()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("inspect", "run.pth", "--bogus", "--report", "junit=old"), "usage"),
        (("inspect", "run.pth", "--report=junit=old", "--limit-factor", "0"), "usage"),
        (("verify", "run.pth", "--to", "cudaa", "--junit", "old"), "unknown-device"),
        (("convert", "none.pth", "--to", "cpu", "--report", "junit=old"), "missing-file"),
    ],
)
def test_an_error_replaces_an_earlier_report(say, bench, words, kind) -> None:
    say("inspect", "run.pth", "--report", "junit=old")
    earlier = (bench / "old").read_text()
    assert say(*words, "--report", "json=new").code in {2, 3}
    assert (bench / "old").read_text() != earlier
    assert f'type="{kind}"' in (bench / "old").read_text()
    assert (bench / "new").exists() is (kind in {"unknown-device", "missing-file"})


def test_an_error_replaces_an_earlier_report_that_is_set(say, bench, monkeypatch) -> None:
    pytest.importorskip("torch")

    def replaced(settings, *words, by="unknown-device"):
        (bench / "pyproject.toml").write_text("")
        say("inspect", "run.pth", "--report", "json=a.json", "--report", "junit=b.xml")
        (bench / "pyproject.toml").write_text(f"[tool.ckptmove]\n{settings}\n")
        assert say("verify", "run.pth", *words).code == 2
        return {path for path in ("a.json", "b.xml") if by in (bench / path).read_text()}

    both = 'report = ["json=a.json"]\njunit = "b.xml"'
    assert replaced(both, "--to", "cudaa") == {"a.json", "b.xml"}
    assert replaced(both, "--to", "cudaa", "--junit", "c.xml") == {"a.json"}
    assert replaced('report = ["json=a.json"]\njunit = 3', "--bogus", by="usage") == set()
    monkeypatch.setenv("CKPTMOVE_REPORT", "json=a.json junit=b.xml")
    assert replaced('to = "cudaa"') == {"a.json", "b.xml"}
    (bench / "pyproject.toml").unlink()
    say("inspect", "run.pth", "--report", "json=a.json")
    assert say("inspect", "run.pth", "--bogus").code == 2  # a setting of verify alone
    assert "unknown-device" not in (bench / "a.json").read_text()
    assert "usage" not in (bench / "a.json").read_text()


def test_an_error_replaces_no_other_file(say, bench) -> None:
    before = (bench / "run.pth").read_bytes()
    for word in ("junit=run.pth", "nothing=run.pth"):
        assert say("inspect", "run.pth", "--bogus", "--report", word).code == 2
    assert (bench / "run.pth").read_bytes() == before


def test_a_report_is_written_to_the_target_of_a_link(say, bench) -> None:
    (bench / "artifacts").mkdir()
    (bench / "link").symlink_to("artifacts/report.json")
    for _ in range(2):
        say("inspect", "run.pth", "--report", "json=link")
        assert (bench / "link").is_symlink()
        assert json.loads((bench / "artifacts" / "report.json").read_text())["command"] == "inspect"
    (bench / "null").symlink_to("/dev/null")
    assert say("inspect", "run.pth", "--report", "json=null").code == 5


@pytest.mark.parametrize("kind", ["json", "markdown", "html", "sarif"])
def test_a_warning_of_convert_is_in_the_report(say, bench, kind) -> None:
    with zipfile.ZipFile(bench / "run.pth") as whole, zipfile.ZipFile(bench / "cut.pth", "w") as cut:
        for record in whole.infolist():
            if not record.filename.endswith("/data/1"):
                cut.writestr(record.filename, whole.read(record))
    said = say("convert", "cut.pth", "--to", "mps", "--dry-run", "--report", f"{kind}=report")
    assert "warning: 1 storage is incomplete (F802)" in said.err
    assert "(F802)" in (bench / "report").read_text()
