"""The JUnit report of ``verify``, read as a CI system would read it."""

from __future__ import annotations

import errno
import os
import zipfile
from xml.etree import ElementTree as ET

import pytest

from ckptmove.cli import verify_command
from ckptmove.proof.evidence import CheckResult, Verdict


@pytest.fixture
def verdicts(monkeypatch):
    """Replace the result of ``verify``: these tests are about the report only."""
    prepared = {}
    real = verify_command.verify_checkpoint

    def verify(request, **callbacks):
        return prepared[request.path] if request.path in prepared else real(request, **callbacks)

    monkeypatch.setattr(verify_command, "verify_checkpoint", verify)

    def prepare(path, *checks, proven=True):
        results = tuple(
            CheckResult(name=name, status=status, detail=detail, evidence=evidence)
            for name, status, detail, evidence in checks
        )
        passed = all(check.status != "failed" for check in results)
        prepared[path] = Verdict(
            path=path, target="cuda:0", mode="simulated", passed=passed, proven=proven and passed, checks=results,
            findings=(),
        )  # fmt: skip

    return prepare


PASSED = ("file", "passed", "8 records", (("bytes", 12),))
FAILED = ("step", "failed", "device mismatch \x1b[31m<&>", (("simulated", True),))
SKIPPED = ("step", "skipped", "no optimizer state", ())


def counts(element):
    return tuple(int(element.get(name)) for name in ("tests", "failures", "errors", "skipped"))


def test_a_check_is_a_case(say, verdicts, bench):
    verdicts("good.pth", PASSED)
    verdicts("bad.pth", PASSED, FAILED)
    said = say("verify", "good.pth", "bad.pth", "none.pth", "--junit", "report.xml")
    assert said.code == 3
    root = ET.parse(bench / "report.xml").getroot()
    assert (root.tag, counts(root)) == ("testsuites", (6, 1, 1, 1))
    good, bad, none = root
    assert [suite.get("name") for suite in root] == ["good.pth", "bad.pth", "none.pth"]
    assert counts(good) == (2, 0, 0, 0)
    assert [case.get("name") for case in good] == ["file", "proven"]
    assert good[0].get("classname") == "good.pth"
    assert good[0].find("system-out").text == "8 records\nbytes = 12"
    failure = bad[1].find("failure")
    assert failure.get("message") == failure.text == r"device mismatch \x1b[31m<&>"
    assert bad[2].find("skipped").get("message") == "failed, simulated cuda:0"
    error = none[0].find("error")
    assert (none[0].get("name"), error.get("type"), counts(none)) == ("verify", "missing-file", (1, 0, 1, 0))
    assert error.text


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_not_proven_is_skipped_or_with_strict_a_failure(say, verdicts, bench, strict):
    verdicts("bare.pth", PASSED, SKIPPED, proven=False)
    assert say("verify", "bare.pth", "--junit", "report.xml", *(["--strict"] if strict else [])).code == int(strict)
    (suite,) = ET.parse(bench / "report.xml").getroot()
    assert suite[1].find("skipped").text == SKIPPED[2]
    (outcome,) = suite[2]
    assert outcome.tag == ("failure" if strict else "skipped")
    by_strict = " (a failure with --strict)" if strict else ""
    assert outcome.get("message").endswith(f"{by_strict}: {SKIPPED[2]}")


EARLIER = "<?xml version='1.0' encoding='utf-8'?>\n<testsuites name=\"ckptmove verify\" tests=\"0\" />"


@pytest.mark.parametrize("old", [EARLIER, ""])
def test_a_report_is_replaced_by_the_next_run(say, verdicts, bench, old):
    (bench / "report.xml").write_text(old)
    verdicts("good.pth", PASSED)
    assert say("verify", "good.pth", "--junit", "report.xml").code == 0
    assert ET.parse(bench / "report.xml").getroot().tag == "testsuites"


@pytest.fixture
def nothing_is_verified(monkeypatch):
    monkeypatch.setattr(verify_command, "verify_checkpoint", lambda request, **_callbacks: pytest.fail(request.path))


@pytest.mark.usefixtures("nothing_is_verified")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("run.pth", "--junit", "./run.pth"), "checkpoint"),
        (("dragged.pth", "--junit", "link.pth", "run.pth"), "checkpoint"),
        (("dragged.pth", "--against", "run.pth", "--junit", "run.pth"), "checkpoint"),
        (("--junit", "run.pth", "dragged.pth"), "JUnit"),
        (("dragged.pth", "--junit", "notes.txt"), "JUnit"),
    ],
)
def test_no_checkpoint_is_replaced_by_a_report(ask, bench, words, found):
    (bench / "link.pth").symlink_to("run.pth")
    (bench / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in bench.iterdir()}
    error = ask("verify", *words)["error"]
    assert (error["kind"], error["exit_code"]) == ("output-is-no-report", 4)
    assert found in error["message"]
    assert {path: path.read_bytes() for path in bench.iterdir()} == before


@pytest.mark.usefixtures("nothing_is_verified")
@pytest.mark.parametrize("path", ["no/such/folder.xml", "run.pth/a.xml", ".", "/dev/null", "a\0b"])
def test_a_report_that_cannot_be_written_is_an_error_before_the_work(ask, path):
    error = ask("verify", "run.pth", "--junit", path)["error"]
    assert (error["kind"], error["exit_code"], error["path"]) == ("write-failed", 5, path)
    assert "--report" in error["hint"]
    assert "--output" not in error["hint"]


def test_a_report_for_which_there_is_no_room_any_more_is_an_error_after_it(ask, verdicts, bench):
    verdicts("good.pth", PASSED)
    real = verify_command.verify_checkpoint

    def verify(request, **callbacks):
        (bench / "reports").rmdir()
        return real(request, **callbacks)

    (bench / "reports").mkdir()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(verify_command, "verify_checkpoint", verify)
        document = ask("verify", "good.pth", "--junit", "reports/new.xml")
    assert (document["exit_code"], document["error"]["path"]) == (5, "reports/new.xml")


@pytest.mark.usefixtures("nothing_is_verified")
def test_a_report_does_not_go_to_standard_output(say, bench):
    said = say("verify", "run.pth", "--junit", "-")
    assert said.code == 2
    assert "./-" in said.err
    assert not (bench / "-").exists()


@pytest.mark.usefixtures("nothing_is_verified")
def test_what_cannot_be_read_is_not_replaced_by_a_report(ask, bench, monkeypatch):
    def refuse(*_arguments):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("ckptmove.cli.render.report_files.open", refuse, raising=False)
    (bench / "report.xml").write_text("mine")
    error = ask("verify", "run.pth", "--junit", "report.xml")["error"]
    assert (error["exit_code"], error["message"]) == (5, f"could not write: {os.strerror(errno.EACCES)}")
    assert (bench / "report.xml").read_text() == "mine"


def outcomes(suite):
    return {case.get("name"): case[0].tag for case in suite}


@pytest.mark.parametrize("strict", [False, True])
def test_a_finding_is_a_case(say, bench, strict):
    words = ("inspect", "dragged.pth", "run.pth", "none.pth", "--report", "junit=report.xml")
    assert say(*words, *(["--strict"] if strict else [])).code == 3
    dragged, run, none = ET.parse(bench / "report.xml").getroot()
    assert outcomes(dragged) == {
        "inspect": "system-out",
        "O201 step-on-accelerator": "failure" if strict else "skipped",
        "R301 rng-on-accelerator": "failure",
    }
    assert "optimizer.state.0.step" in dragged[1][0].text
    assert outcomes(run) == {"inspect": "system-out"}  # without its notes
    assert (outcomes(none), counts(none)) == ({"inspect": "error"}, (1, 0, 1, 0))


def test_an_expectation_is_a_case(say, bench):
    for device, tag in (("cuda:1", "failure"), ("cuda:3", "system-out")):
        say("inspect", "run.pth", "--expect", device, "--report", "junit=report.xml", "--select", "S701")
        (suite,) = ET.parse(bench / "report.xml").getroot()
        assert outcomes(suite) == {"inspect": "system-out", "expect": tag}


def test_a_property_that_differs_is_a_failed_case(say, bench):
    say("diff", "run.pth", "dragged.pth", "--report", "junit=report.xml")
    (suite,) = ET.parse(bench / "report.xml").getroot()
    failed = {name for name, tag in outcomes(suite).items() if tag == "failure"}
    assert failed == {"added", "device", "value", "object"}
    assert {"removed", "dtype", "shape", "uncompared"} <= outcomes(suite).keys() - failed
    assert suite.get("name") == "dragged.pth"
    assert suite[1][0].text.split("\n")[0] == "rng.torch"


def test_a_conversion_is_a_case(say, bench):
    words = ("convert", "run.pth", "--to", "cpu", "--report", "junit=report.xml", "-o", "new.pth")
    seen = []
    for more in ((), ("--skip-existing",), ("--force", "--keep", "none", "--strict")):
        say(*words, *more)
        (suite,) = ET.parse(bench / "report.xml").getroot()
        seen.append(outcomes(suite)["convert"])
    assert seen == ["system-out", "skipped", "failure"]


def test_warnings_of_a_conversion_are_a_case(say, bench):
    with zipfile.ZipFile(bench / "run.pth") as whole, zipfile.ZipFile(bench / "cut.pth", "w") as cut:
        for record in whole.infolist():
            if not record.filename.endswith("/data/1"):
                cut.writestr(record.filename, whole.read(record))
    say("convert", "cut.pth", "--to", "cpu", "--report", "junit=report.xml", "-o", "new.pth")
    (suite,) = ET.parse(bench / "report.xml").getroot()
    assert outcomes(suite) == {"convert": "system-out", "warnings": "skipped"}
    assert "(F802)" in suite.find("testcase/skipped").get("message")
