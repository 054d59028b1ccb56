"""``--report sarif=FILE``: SARIF 2.1.0, which GitHub and other code hosts show as alerts.

Each finding, failed check, difference and unreadable file is a result at its file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptmove import __version__
from ckptmove.cli.render.renderer import Document
from ckptmove.cli.render.report import ReportCase, ReportRenderer
from ckptmove.cli.render.text import sentence

if TYPE_CHECKING:
    from ckptmove.cli.render.renderer import Summary
    from ckptmove.cli.render.report import Report

_Json: TypeAlias = "dict[str, Any]"

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
#: Levels of results, by the level of a case.
_LEVELS: Final = {"error": "error", "warning": "warning", "info": "note"}
#: Kinds of cases that are results.
_KINDS: Final = frozenset({"finding", "expect", "fit", "unmatched", "source", "check", "unproven", "property"})
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


class SarifDocument(ReportRenderer, Document):
    """One run with its results."""

    title = "a SARIF report of ckptmove"
    head = f'{{"$schema": "{SCHEMA}", "version": "2.1.0", "runs": [{{"tool": {{"driver": {{"name": "ckptmove"'.encode()
    is_data = True

    def __init__(self) -> None:
        self._results: list[_Json] = []

    def add(self, report: Report) -> None:
        """Add the findings, and what failed or is doubtful; options without a match come last."""
        for case in sorted(report.cases, key=lambda case: case.kind == "unmatched"):
            rule, text = f"{report.command}/{case.name}", case.text
            if case.kind == "finding":
                rule = case.name.partition(" ")[0]
            elif case.kind == "unproven":
                rule = f"{report.command}/unproven"
            elif case.kind == "property":
                text = f"{case.name}: {len(case.where):,} differences from {report.reference}"
            if case.kind in _KINDS and case.level in _LEVELS:
                self._add(rule, case, text, report.path)

    def document(self, summary: Summary) -> str:
        """The document. An error is a notification of the run; one of a file is also a result."""
        from ckptmove.api.document import dumps

        notes = []
        for failure in summary.failures:
            if failure.path is not None:
                self._add(
                    f"error/{failure.kind}", ReportCase("error", failure.kind, "error"), failure.text, failure.path
                )
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

    def _add(self, rule: str, case: ReportCase, text: str, path: str) -> None:
        names = case.where
        more = f" (+{len(names) - _SHOWN:,} more)" if len(names) > _SHOWN else ""
        # GitHub shows only locations with a line, also of a file without lines.
        artifact, region = {"uri": _uri(case.path or path)}, {"startLine": case.line or 1}
        place: _Json = {"physicalLocation": {"artifactLocation": artifact, "region": region}}
        if names:
            place["logicalLocations"] = [{"fullyQualifiedName": sentence(name)} for name in names[:_SHOWN]]
        message = {"text": sentence(text) + more}
        self._results.append({"ruleId": rule, "level": _LEVELS[case.level], "message": message, "locations": [place]})


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
