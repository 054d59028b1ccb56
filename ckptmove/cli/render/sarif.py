"""``--report sarif=FILE``: SARIF 2.1.0, which GitHub and other code hosts show as alerts.

Each finding, failed check, difference and unreadable file is a result at its file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptmove import __version__
from ckptmove.cli.render.renderer import Document
from ckptmove.cli.render.text import sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.render.renderer import ConvertAnswer, InspectAnswer, Summary, VerifyAnswer
    from ckptmove.comparison.differences import Differences
    from ckptmove.model import Finding

_Json: TypeAlias = "dict[str, Any]"

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
#: Levels of results, by the severity of a finding.
_LEVELS: Final = {"error": "error", "warning": "warning", "info": "note"}
#: Names of one result; the others are counted.
_SHOWN: Final = 20
#: Rules that are not in the catalogue of findings, by the first part of their id.
_OTHER_RULES: Final = {
    "verify": "a check of 'ckptmove verify' failed",
    "diff": "'ckptmove diff' found a difference",
    "inspect": "a checkpoint is not what 'ckptmove inspect --expect' or '--fit' asks for",
    "convert": "an option of 'ckptmove convert' matches nothing",
    "error": "a checkpoint could not be read or written",
}


class SarifDocument(Document):
    """One run with its results."""

    title = "a SARIF report of ckptmove"
    head = f'{{"$schema": "{SCHEMA}", "version": "2.1.0", "runs": [{{"tool": {{"driver": {{"name": "ckptmove"'.encode()

    def __init__(self) -> None:
        self._results: list[_Json] = []

    def inspect(self, answer: InspectAnswer) -> None:
        """Add the findings, an unmet expectation, and too little memory."""
        path, expectation, fit = answer.result.inventory.path, answer.result.expectation, answer.result.fit
        self._findings(path, answer.result.findings)
        if expectation is not None and expectation.misplaced:
            names = expectation.misplaced_names
            self._add("inspect/expect", "error", f"not on {expectation.device}", path, names)
        if fit is not None and not fit.fits:
            self._add("inspect/fit", "error", str(fit), path)

    def convert(self, answer: ConvertAnswer) -> None:
        """Add the options that match nothing, and problems of the source."""
        level = "error" if answer.exit_code else "warning"
        for warning in answer.result.warnings:
            self._add("convert/source", "warning", warning, answer.request.path)
        for one in answer.result.unmatched:
            self._add(f"convert/{one.option}", level, str(one), answer.request.path)

    def verify(self, answer: VerifyAnswer) -> None:
        """Add the failed checks, the findings, and a resume that is not proven."""
        from ckptmove.cli.render.verification import outcome, place_of

        result = answer.result
        for check in result.checks:
            if check.status == "failed":
                path, line = place_of(check, result)
                self._add(f"verify/{check.name}", "error", check.detail, path, line=line or 1)
        self._findings(result.path, result.findings)
        if result.passed and not result.proven:
            level = "error" if answer.strict else "warning"
            self._add("verify/unproven", level, outcome(result, strict=answer.strict), result.path)

    def diff(self, result: Differences) -> None:
        """Add one result for each property that differs."""
        from ckptmove.cli.render.difference import names_by_difference

        for what, own in names_by_difference(result).items():
            if own:
                message = f"{what}: {len(own):,} differences from {result.first}"
                self._add(f"diff/{what}", "warning", message, result.second, own)

    def document(self, summary: Summary) -> str:
        """The document. An error is a notification of the run; one of a file is also a result."""
        from ckptmove.api.document import dumps

        notes = []
        for failure in summary.failures:
            if failure.path is not None:
                self._add(f"error/{failure.kind}", "error", failure.text, failure.path)
            message = {"text": sentence(f"{failure.path}: {failure.text}" if failure.path else failure.text)}
            notes.append({"level": "error", "message": message, "descriptor": {"id": failure.kind}})
        ids = list(dict.fromkeys(one["ruleId"] for one in self._results))
        driver = {"name": "ckptmove", "semanticVersion": __version__, "rules": [_rule(one) for one in ids]}
        invocation = {
            "executionSuccessful": not notes,
            "exitCode": summary.exit_code,
            "toolExecutionNotifications": notes,
        }
        run = {
            "tool": {"driver": driver},
            "invocations": [invocation],
            "results": [{**one, "ruleIndex": ids.index(one["ruleId"])} for one in self._results],
        }
        return f"{dumps({'$schema': SCHEMA, 'version': '2.1.0', 'runs': [run]})}\n"

    def _findings(self, path: str, findings: Sequence[Finding]) -> None:
        for one in findings:
            message = f"{one.message}; fix: {one.fix}" if one.fix else one.message
            self._add(one.code, _LEVELS[one.severity.value], message, path, one.where)

    def _add(self, rule: str, level: str, message: str, path: str, names: Sequence[str] = (), *, line: int = 1) -> None:
        more = f" (+{len(names) - _SHOWN:,} more)" if len(names) > _SHOWN else ""
        # GitHub shows only locations with a line, also of a file without lines.
        place: _Json = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}, "region": {"startLine": line}}}
        if names:
            place["logicalLocations"] = [{"fullyQualifiedName": sentence(name)} for name in names[:_SHOWN]]
        text = sentence(message) + more
        self._results.append({"ruleId": rule, "level": level, "message": {"text": text}, "locations": [place]})


def _rule(rule: str) -> _Json:
    from ckptmove.findings.catalogue import CATALOGUE

    entry = CATALOGUE.get(rule)
    if entry is None:
        return {"id": rule, "shortDescription": {"text": _OTHER_RULES[rule.partition("/")[0]]}}
    return {
        "id": rule,
        "name": entry.name,
        "shortDescription": {"text": entry.when},
        "fullDescription": {"text": entry.why},
        "help": {"text": entry.mend},
        "defaultConfiguration": {"level": _LEVELS[entry.severity.value]},
    }


def _uri(path: str) -> str:
    """A path as a URI reference, relative if the path is."""
    from urllib.parse import quote

    if "://" in path:
        return quote(path, safe="/:?&=@%")
    return Path(path).as_uri() if os.path.isabs(path) else quote(os.fsencode(Path(path).as_posix()))
