"""``--strict`` of every command: warnings fail, and so does a resume that is not proven."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ckptmove.api import results
from ckptmove.cli import verify_command
from ckptmove.model import Finding, Severity, fails_run
from ckptmove.proof.evidence import Verdict
from ckptmove.testing import assert_resumes
from ckptmove.training import run

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"
UNTIED = ("convert", "run.pth", "--to", "cpu", "--keep", "modle.*")


def finding(severity: Severity) -> Finding:
    return Finding("K601", "wrapper-prefix", severity, "every key of it", ("model",), "")


@pytest.fixture
def verdict(monkeypatch):
    """Let ``verify`` answer at once."""

    def verdict(*severities, proven=True):
        result = Verdict(
            path="run.pth", target="cuda:0", mode="simulated", passed=True, proven=proven, checks=(),
            findings=tuple(map(finding, severities)),
        )  # fmt: skip
        for module in (verify_command, run):
            monkeypatch.setattr(module, "verify_checkpoint", lambda _request, **_callbacks: result)
        return result

    return verdict


@pytest.mark.parametrize(
    ("severities", "by_default", "strictly"),
    [
        ((), False, False),
        ((Severity.INFO,), False, False),
        ((Severity.WARNING,), False, True),
        ((Severity.INFO, Severity.ERROR), True, True),
    ],
)
def test_what_fails_a_run(severities, by_default, strictly):
    findings = [finding(severity) for severity in severities]
    assert fails_run(findings, strict=False) is by_default
    assert fails_run(findings, strict=True) is strictly


@pytest.mark.parametrize("by_project", [False, True])
@pytest.mark.parametrize(
    ("severities", "proven", "code"),
    [((Severity.WARNING,), True, 1), ((Severity.INFO,), True, 0), ((), False, 1), ((), True, 0)],
)
def test_verify_fails_in_every_rendering(say, ask, bench, verdict, severities, proven, code, by_project):
    verdict(*severities, proven=proven)
    words = ("verify", "run.pth", "--junit", "report.xml")
    assert say(*words).code == 0
    assert not ET.parse(bench / "report.xml").getroot().findall(".//failure")
    if by_project:
        (bench / "pyproject.toml").write_text("[tool.ckptmove]\nstrict = true\n")
    else:
        words = (*words, "--strict")
    said = say(*words)
    assert said.code == code
    assert ("--strict" in said.out.splitlines()[-1]) == bool(code)
    assert say(*words, "-q").code == ask(*words)["exit_code"] == code
    last = say(*words, "--format", "github").out.splitlines()[-1]
    assert last.startswith("::error file=run.pth,title=verify::" if code else "::notice ")
    failures = ET.parse(bench / "report.xml").getroot().findall(".//failure/..")
    assert [case.get("name") for case in failures] == (["warnings"] if severities and code else ["proven"] * code)


def test_a_test_of_the_users_can_be_strict_too(verdict):
    warned = verdict(Severity.WARNING)
    assert assert_resumes("run.pth") == results.VerifyResult.of(warned)
    with pytest.raises(AssertionError, match=": K601") as caught:
        assert_resumes("run.pth", strict=True)
    assert str(caught.value).splitlines()[1:] == [f"  K601: {finding.message}" for finding in warned.findings]
    unproven = verdict(proven=False)
    assert assert_resumes("run.pth", require_proof=False) == results.VerifyResult.of(unproven)
    with pytest.raises(AssertionError, match="not proven"):
        assert_resumes("run.pth", require_proof=False, strict=True)


def test_inspect_and_verify_of_a_file_with_a_warning(say, bench, simulates):
    shutil.copy(SAMPLES / "dataparallel-two-gpus.pth", bench / "two.pth")
    for command in ("inspect", "verify"):
        assert say(command, "two.pth").code == 0
        assert say(command, "two.pth", "--strict", "--ignore", "D101,K601").code == 0
    (bench / "pyproject.toml").write_text("[tool.ckptmove]\nstrict = true\n")
    assert say("inspect", "two.pth").code == say("verify", "two.pth").code == 1


@pytest.mark.parametrize("more", [(), ("--in-place",), ("--dry-run",), ("--quiet",)])
def test_convert_writes_nothing_where_an_option_met_nothing(say, ask, bench, more):
    before = (bench / "run.pth").read_bytes()
    said = say(*UNTIED, "--strict", *more)
    assert said.code == 1
    assert said.err.startswith("error: --keep modle.* ")
    assert "next:" not in said.err
    document = ask(*UNTIED, "--strict", *more)
    assert (document["output"], document["error"], len(document["notes"])) == (None, None, 1)
    github = say(*UNTIED, "--strict", *more, "--format", "github").out
    assert github.startswith("::error file=run.pth,title=convert --keep::")
    assert (bench / "run.pth").read_bytes() == before
    assert not (bench / "run.cpu.pth").exists()
    assert say(*UNTIED, *more).code == 0


def test_convert_that_meets_everything_is_made(say, bench):
    (bench / "pyproject.toml").write_text("[tool.ckptmove]\nstrict = true\n")
    configured, typed = say(*UNTIED), say(*UNTIED, "--strict")
    assert configured.code == typed.code == 1
    assert "set strict = false in /" in configured.err
    assert "--strict" not in configured.err
    assert "leave out --strict" in typed.err
    assert "pyproject" not in typed.err
    assert say("convert", "run.pth", "--to", "cpu", "--keep", "model.*").code == 0
    assert (bench / "run.cpu.pth").exists()
    assert say("convert", "run.pth", "--to", "cpu", "--in-place").code == 0
    assert say("convert", "run.pth", "--undo", "--strict").code == 2
    assert say("convert", "run.pth", "--undo").code == 0
