"""Which findings count: ``--select`` and ``--ignore``.

Never judges a finding: it leaves some out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmove.errors import UsageError
from ckptmove.findings.catalogue import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.model import Finding


@dataclass(frozen=True, slots=True)
class Selection:
    """The codes that count.

    Attributes:
        codes: stable codes.
    """

    codes: frozenset[str]

    def among(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """The findings that count, in their order."""
        return tuple(finding for finding in findings if finding.code in self.codes)


def selection(select: Sequence[str], ignore: Sequence[str]) -> Selection:
    """What is left of the catalogue.

    Args:
        select: codes, beginnings of codes (``D``) or names, also with commas between them; all where there are none.
        ignore: likewise; these do not count.

    Raises:
        UsageError: there is no such code.
    """
    return Selection((_codes(select) or frozenset(CATALOGUE)) - _codes(ignore))


def _codes(words: Sequence[str]) -> frozenset[str]:
    parts = [part for word in words for part in word.replace(",", " ").split()]
    return frozenset(code for part in parts for code in codes_like(part))


def codes_like(word: str) -> tuple[str, ...]:
    """The codes that a word means.

    Raises:
        UsageError: there is none.
    """
    begin, name = word.upper(), word.lower()
    codes = tuple(code for code, entry in CATALOGUE.items() if code.startswith(begin) or entry.name == name)
    if not codes:
        raise UsageError(f"'{word}' is no code of a finding; 'ckptmove rules' lists them")
    return codes
