"""SARIF reports, validated with the published schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch

from ckptmove.cli.render.sarif import _uri
from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.proof.evidence import CheckResult, Verdict

SCHEMA = json.loads((Path(__file__).parents[2] / "support/schemas/sarif-2.1.0-rtm.5.json").read_text())
VALIDATOR = jsonschema.Draft4Validator(SCHEMA, format_checker=jsonschema.FormatChecker())


@pytest.fixture
def run(say, bench):
    """Type a command, and get the run of its SARIF report."""

    def run(*words):
        said = say(*words, "--report", "sarif=report.sarif")
        document = json.loads((bench / "report.sarif").read_text())
        VALIDATOR.validate(document)
        (run,) = document["runs"]
        (invocation,) = run["invocations"]
        assert invocation["exitCode"] == said.code
        rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
        assert [rules[one["ruleIndex"]] for one in run["results"]] == [one["ruleId"] for one in run["results"]]
        return run

    return run


def results(run):
    return [
        (one["ruleId"], one["level"], one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"])
        for one in run["results"]
    ]


def test_findings_are_results_with_the_rules_of_the_catalogue(run) -> None:
    found = run("inspect", "dragged.pth", "run.pth")
    assert results(found)[:2] == [("O201", "warning", "dragged.pth"), ("R301", "error", "dragged.pth")]
    assert {one[1] for one in results(found)} == {"error", "warning", "note"}
    rule = found["tool"]["driver"]["rules"][0]
    assert (rule["name"], rule["help"]["text"]) == ("step-on-accelerator", CATALOGUE["O201"].mend)
    places = found["results"][0]["locations"][0]["logicalLocations"]
    assert places[0] == {"fullyQualifiedName": "optimizer.state.0.step"}


def test_an_unmet_expectation_is_a_result_with_some_names(run) -> None:
    (found,) = run("inspect", "run.pth", "--expect", "cuda:1", "--select", "D101")["results"]
    assert (found["ruleId"], found["level"]) == ("inspect/expect", "error")
    assert len(found["locations"][0]["logicalLocations"]) == 12
    assert run("inspect", "run.pth", "--expect", "cuda:3", "--select", "D101")["results"] == []


def test_many_names_are_counted(run, bench) -> None:
    for name, value in (("a.pth", 0.0), ("b.pth", 1.0)):
        torch.save({f"w{index}": torch.full((1,), value) for index in range(25)}, bench / name)
    (found,) = run("diff", "a.pth", "b.pth")["results"]
    assert len(found["locations"][0]["logicalLocations"]) == 20
    assert found["message"]["text"].endswith("(+5 more)")


def test_differences_are_one_result_for_each_property(run) -> None:
    found = run("diff", "run.pth", "dragged.pth")
    assert {one["ruleId"] for one in found["results"]} == {"diff/device", "diff/value", "diff/object", "diff/added"}
    assert run("diff", "run.pth", "run.pth")["results"] == []


def test_options_that_match_nothing_are_results(run) -> None:
    words = ("convert", "run.pth", "--to", "cpu", "--keep", "nothing", "--dry-run")
    assert results(run(*words)) == [("convert/keep", "warning", "run.pth")]
    assert results(run(*words, "--strict")) == [("convert/keep", "error", "run.pth")]


def test_an_unreadable_file_is_a_result_and_a_wrong_option_a_notification(run) -> None:
    found = run("inspect", "none.pth", "run.pth", "--ignore", "D,R,S")
    assert results(found) == [("error/missing-file", "error", "none.pth")]
    (note,) = found["invocations"][0]["toolExecutionNotifications"]
    assert (note["descriptor"]["id"], found["invocations"][0]["executionSuccessful"]) == ("missing-file", False)
    assert note["message"]["text"].startswith("none.pth: ")
    found = run("verify", "run.pth", "dragged.pth", "--against", "run.pth")
    (note,) = found["invocations"][0]["toolExecutionNotifications"]
    assert (note["descriptor"]["id"], found["invocations"][0]["executionSuccessful"]) == ("usage", False)


@pytest.mark.parametrize("strict", [False, True])
def test_failed_checks_and_doubts_are_results(run, monkeypatch, strict) -> None:
    checks = (
        CheckResult("file", "passed", "fine"),
        CheckResult("case", "failed", "a\x1b[31m", (("file", "jobs/train.py"), ("line", 7))),
    )
    verdicts = {
        "run.pth": Verdict(
            path="run.pth", target="cpu", mode="cpu", passed=False, proven=False, checks=checks, findings=()
        ),
        "dragged.pth": Verdict(
            path="dragged.pth", target="cpu", mode="cpu", passed=True, proven=False, checks=(), findings=()
        ),
    }
    monkeypatch.setattr(
        "ckptmove.cli.verify_command.verify_checkpoint", lambda request, **_callbacks: verdicts[request.path]
    )
    found = run("verify", "run.pth", "dragged.pth", *(["--strict"] if strict else []))
    doubt = ("verify/unproven", "error" if strict else "warning", "dragged.pth")
    assert results(found) == [("verify/case", "error", "jobs/train.py"), doubt]
    assert found["results"][0]["locations"][0]["physicalLocation"]["region"] == {"startLine": 7}
    assert "\x1b" not in found["results"][0]["message"]["text"]


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("runs/a b.pth", "runs/a%20b.pth"),
        ("./-#%.pth", "-%23%25.pth"),
        ("/abs/ü.pth", "file:///abs/%C3%BC.pth"),
        ("a\udcff.pth", "a%FF.pth"),
        ("s3://bucket/a b.pth", "s3://bucket/a%20b.pth"),
    ],
)
def test_a_path_is_a_uri(path, uri) -> None:
    assert _uri(path) == uri
