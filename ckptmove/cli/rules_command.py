"""``rules``, between its option and its report.

Never words a rule: the catalogue does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.cli.outcome import YES
from ckptmove.cli.render import document, github, rules
from ckptmove.cli.streams import Format, suggest
from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.findings.codes import codes_like

if TYPE_CHECKING:
    from ckptmove.cli.streams import Output


def run_rules(word: str | None, out: Output) -> int:
    """Show the catalogue, or what a word means in it: a code, the beginning of some, or a name.

    Raises:
        UsageError: it means nothing.
    """
    entries = [CATALOGUE[code] for code in (codes_like(word) if word is not None else CATALOGUE)]
    if out.format is Format.JSON:
        out.document(document.rules_document(entries))
    elif out.format is Format.GITHUB:
        out.lines(github.entry_line(entry) for entry in entries)
    elif out.quiet:
        out.lines(rules.brief_line(entry) for entry in entries)
    elif len(entries) == 1 or out.verbose:
        for entry in entries:
            out.report(rules.entry_lines(out.page, entry))
    else:
        out.lines(rules.catalogue_lines(out.page, entries))
        suggest("ckptmove rules CODE")
    return YES
