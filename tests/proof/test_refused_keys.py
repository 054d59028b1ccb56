"""K601 is a warning if a strict load has failed on the prefix, and a note otherwise."""

from __future__ import annotations

import pytest

from ckptmove.model import Finding, Severity
from ckptmove.proof.checks import failed, passed
from ckptmove.proof.refused_keys import with_refused_keys
from ckptmove.text import Command

FIX = Command("ckptmove convert run.pth --strip-prefix module.")
NOTE = Finding("K601", "wrapper-prefix", Severity.INFO, "every key starts with 'module.'")


@pytest.mark.parametrize(
    ("check", "severity", "fix"),
    [
        (failed("script", "Missing key(s)", FIX, prefix="module."), "warning", FIX),
        (failed("script", "Missing key(s)"), "info", ""),
        (failed("script", "Missing key(s)", Command("ckptmove convert run.pth --add-prefix a.")), "info", ""),
        (passed("script", "AdamW on cpu"), "info", ""),
    ],
)
def test_the_note_becomes_a_warning(check, severity, fix) -> None:
    others = (NOTE._replace(severity=Severity.WARNING, fix="own"), NOTE._replace(code="R302"))
    note, *rest = with_refused_keys([NOTE, *others], [passed("case", ""), check])
    assert (note.severity, note.fix, tuple(rest)) == (severity, fix, others)
