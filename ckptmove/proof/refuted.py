"""Drop the findings that a run of the user's code has refuted, and judge *placement* by that run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ckptmove.model import Severity
from ckptmove.proof.checks import CASE, ORDER, SCRIPT, passed, skipped
from ckptmove.proof.file_checks import FAILED_BY, fail_on_findings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptmove.model import Finding
    from ckptmove.proof.evidence import CheckResult

#: Findings that say why a restore or the first step fails: refuted by a step from the stored models and optimizers.
_BY_A_STEP: Final = frozenset({"D101", "D102", "O202", "O204", "O206", "O207", "O208", "T401"})
#: Findings about what a script makes of the file: devices that it names, and keys. A case restores by keys without the
#: prefixes of wrappers.
_BY_A_SCRIPT: Final = frozenset({"D104", "K601"})
_KEYS: Final = frozenset({"K601"})
#: A proven script has restored the RNG states too.
_RNG: Final = frozenset({"R301"})


def judge(
    checks: Mapping[str, CheckResult], findings: Sequence[Finding], runs: Sequence[CheckResult]
) -> tuple[tuple[CheckResult, ...], tuple[Finding, ...]]:
    """The checks in the order of the report, failed by the findings that no run has refuted, and those findings.

    The runs are the checks ``case`` and ``script``, if they were made.
    """
    left = without_refuted(findings, runs)
    judged = {name: fail_on_findings(checks[name], left) for name in ORDER if name in checks}
    judged["placement"] = placement_seen(checks["placement"], judged["placement"], left, runs)
    return (*judged.values(),), left


def without_refuted(findings: Sequence[Finding], runs: Sequence[CheckResult]) -> tuple[Finding, ...]:
    """The findings that no run of a case or script has refuted. An index that a case passed is a warning."""
    left = list(findings)
    for run in runs:
        figures = dict(run.evidence)
        codes = _refuted_codes(run, figures)
        left = [one for finding in left if finding.code not in codes for one in _unfrozen(finding, run.name, figures)]
        if run.name == CASE and run.status == "passed":  # it resumed, but not through ``torch.load``
            left = [one._replace(severity=Severity.WARNING) if one.code == "D103" else one for one in left]
    return (*left,)


def _refuted_codes(run: CheckResult, figures: dict[str, Any]) -> frozenset[str]:
    if run.status != "passed":
        return frozenset()
    # ``torch.load`` in a script has accepted every device that the file names.
    codes = frozenset({"D103"}) if run.name == SCRIPT else frozenset()
    if figures.get("resumed") is True:
        codes |= _BY_A_STEP | (_BY_A_SCRIPT if run.name == SCRIPT else frozenset())
        codes |= _KEYS if figures.get("keys_as_stored") else frozenset()
    return codes | (_RNG if run.name == SCRIPT and figures.get("proven") is True else frozenset())


def _unfrozen(finding: Finding, run: str, figures: dict[str, Any]) -> Iterator[Finding]:
    """Iterate over a finding, unless it is about parameters without state (O205) that were frozen in the run."""
    frozen = frozenset(figures.get("frozen", ())) if finding.code == "O205" else frozenset()
    where = tuple(path for path in finding.where if path not in frozen)
    if len(where) == len(finding.where):
        yield finding
    elif where:
        seen = f"{len(finding.where) - len(where):,} of them frozen in the {run}"
        yield finding._replace(message=f"{finding.message} ({seen})", where=where)


def placement_seen(
    placement: CheckResult, judged: CheckResult, left: Iterable[Finding], runs: Sequence[CheckResult]
) -> CheckResult:
    """The check ``placement`` of a file from which a case or script was run: what the run did decides.

    An error among the findings that are left, which may have failed the judged check, is not repaired by a step.
    """
    ran = next((run for run in runs if run.status != "skipped"), None)
    if ran is None or (judged.status != "failed" and ran.status == "failed") or placement.status == "skipped":
        return judged
    figures, detail = dict(placement.evidence), "; ".join(placement.failures) or placement.detail
    if ran.status == "failed":
        return skipped("placement", f"{detail}; not judged, as the {ran.name} fails", **figures)
    if any(FAILED_BY.get(one.code) == "placement" and one.severity is Severity.ERROR for one in left):
        return judged
    did = dict(ran.evidence)
    seen = "resumed" if did.get("resumed") is True else "made its step"
    mode = " (simulated)" * bool(did["simulated"])
    return passed("placement", f"{detail}; the {ran.name} {seen} on {did['device']}{mode}", **figures)
