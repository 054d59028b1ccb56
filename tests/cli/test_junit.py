"""The JUnit report of ``verify``, read as a CI system would read it."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from ckptmove import api
from ckptmove.evidence import CheckResult, VerifyResult


@pytest.fixture
def verdicts(monkeypatch):
    """Let ``verify`` answer at once: what is reported is not how it was found."""
    prepared = {}
    real = api.verify

    def verify(path, **options):
        return prepared[path] if path in prepared else real(path, **options)

    monkeypatch.setattr(api, "verify", verify)

    def prepare(path, *checks, proven=True):
        results = tuple(
            CheckResult(name=name, status=status, detail=detail, evidence=evidence)
            for name, status, detail, evidence in checks
        )
        passed = all(check.status != "failed" for check in results)
        prepared[path] = VerifyResult(
            path=path, target="cuda:0", mode="simulated", passed=passed, proven=proven and passed, checks=results,
            findings=(),
        )  # fmt: skip

    return prepare


PASSED = ("file", "passed", "8 records", (("bytes", 12),))
FAILED = ("step", "failed", "device mismatch \x1b[31m<&>", ())
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
    assert suite[1].find("skipped").text == "no optimizer state"
    (outcome,) = suite[2]
    assert outcome.tag == ("failure" if strict else "skipped")
    assert outcome.get("message").endswith("a resume is not proven: no optimizer state")


def test_a_report_is_replaced_by_the_next_run(say, verdicts, bench):
    (bench / "report.xml").write_text("old")
    verdicts("good.pth", PASSED)
    assert say("verify", "good.pth", "--junit", "report.xml").code == 0
    assert ET.parse(bench / "report.xml").getroot().tag == "testsuites"


def test_a_report_that_cannot_be_written_is_an_error(ask, verdicts, bench):
    verdicts("good.pth", PASSED)
    document = ask("verify", "good.pth", "--junit", "no/such/folder.xml")
    assert document["exit_code"] == 5
    assert document["error"]["path"] == "no/such/folder.xml"
