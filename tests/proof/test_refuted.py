"""Findings that a run of the user's code refutes are dropped, and *placement* says what the run did."""

from __future__ import annotations

import pytest

from ckptmove.findings.catalogue import found
from ckptmove.model import Severity
from ckptmove.proof.checks import CASE, SCRIPT, failed, passed, skipped
from ckptmove.proof.refuted import judge, placement_seen, without_refuted

FIGURES = {"device": "cuda:0", "simulated": True}
PLACED = passed("placement", "12 tensors on cpu", misplaced=0)
STUCK = failed("placement", ["4 tensors stuck", "cpu -> cuda:0: a"], "ckptmove convert", misplaced=4)


def run(name, result=passed, *, proven=True, resumed=True, **figures):
    return result(name, "detail", **FIGURES, proven=proven and resumed, resumed=resumed, **figures)


@pytest.mark.parametrize(
    ("runs", "dropped"),
    [
        ([], set()),
        ([run(SCRIPT, skipped, resumed=False)], set()),
        ([run(SCRIPT, failed, resumed=False)], set()),
        ([run(CASE, resumed=False)], set()),
        ([run(SCRIPT, resumed=False)], {"D103"}),
        ([run(CASE)], {"D101", "D102", "O202", "O208", "T401"}),
        ([run(CASE, keys_as_stored=True)], {"D101", "D102", "K601", "O202", "O208", "T401"}),
        ([run(SCRIPT, proven=False)], {"D101", "D102", "D103", "D104", "K601", "O202", "O208", "T401"}),
        ([run(SCRIPT)], {"D101", "D102", "D103", "D104", "K601", "O202", "O208", "R301", "T401"}),
    ],
)
def test_what_a_run_refutes(runs, dropped):
    every = ["D101", "D102", "D103", "D104", "O201", "O202", "O208", "R301", "R302", "T401", "K601", "S701", "F801"]
    left = without_refuted([found(code, "", (), "") for code in every], runs)
    assert {*every} - {one.code for one in left} == dropped


@pytest.mark.parametrize(("result", "severity"), [(passed, "warning"), (failed, "error"), (skipped, "error")])
def test_a_device_that_is_not_there_is_no_error_after_a_case_has_passed(result, severity):
    (left,) = without_refuted([found("D103", "", (), "")], [run(CASE, result, resumed=False)])
    assert left.severity == severity


@pytest.mark.parametrize(
    ("frozen", "left"), [([], "abc"), (["a", "b", "c", "d"], ""), (["a", "c"], "b"), (["d"], "abc")]
)
def test_parameters_that_were_frozen_in_the_run_have_lost_no_state(frozen, left):
    findings = [found("O205", "3 parameters", "abc", ""), found("O204", "", "a", "")]
    kept = without_refuted(findings, [run(SCRIPT, resumed=False, frozen=frozen)])
    assert ["".join(one.where) for one in kept] == [*[left] * bool(left), "a"]
    assert ("2 of them frozen in the script" in kept[0].message) == (left == "b")


@pytest.mark.parametrize(
    ("placement", "judged", "runs", "status", "detail"),
    [
        (PLACED, PLACED, [], "passed", "12 tensors on cpu"),
        (PLACED, STUCK, [], "failed", STUCK.detail),
        (PLACED, STUCK, [run(CASE, skipped)], "failed", STUCK.detail),
        (PLACED, PLACED, [run(CASE, failed)], "passed", "12 tensors on cpu"),
        (STUCK, STUCK, [run(SCRIPT, failed)], "skipped", "stuck; cpu -> cuda:0: a; not judged, as the script fails"),
        (STUCK, STUCK, [run(CASE)], "passed", "cpu -> cuda:0: a; the case resumed on cuda:0 (simulated)"),
        (PLACED, STUCK, [run(SCRIPT, resumed=False)], "passed", "; the script made its step on cuda:0 (simulated)"),
        (skipped("placement", "no devices"), STUCK, [run(CASE)], "failed", STUCK.detail),
    ],
)
def test_a_run_decides_on_the_placement(placement, judged, runs, status, detail):
    check = placement_seen(placement, judged, (), runs)
    assert (check.status, check.detail.endswith(detail)) == (status, True)
    assert dict(check.evidence) == (dict(judged.evidence) if check is judged else dict(placement.evidence))


@pytest.mark.parametrize(
    ("code", "severity", "name", "status"),
    [
        ("R301", Severity.ERROR, CASE, "failed"),
        ("R301", Severity.ERROR, SCRIPT, "passed"),  # it has restored the RNG states
        ("D104", Severity.ERROR, CASE, "failed"),
        ("D104", Severity.WARNING, CASE, "passed"),
        ("D101", Severity.ERROR, CASE, "passed"),
        ("D103", Severity.ERROR, CASE, "passed"),
        ("F801", Severity.ERROR, CASE, "passed"),
    ],
)
def test_an_error_that_the_run_did_not_refute_still_fails_placement(code, severity, name, status):
    checks, _ = judge({"placement": PLACED}, [found(code, "", (), "")._replace(severity=severity)], [run(name)])
    assert [check.status for check in checks] == [status]


def test_a_real_device_is_not_called_simulated():
    check = placement_seen(PLACED, PLACED, (), [passed(CASE, "", device="cuda:0", simulated=False, resumed=True)])
    assert check.detail == "12 tensors on cpu; the case resumed on cuda:0"
