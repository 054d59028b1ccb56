"""Which findings count: ``--select`` and ``--ignore``.

Never judges a finding: it leaves some out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckptmove.findings.catalogue import CATALOGUE
from ckptmove.findings.codes import codes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.model import Finding


class Selection(NamedTuple):
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
    return Selection((codes_of(select) or frozenset(CATALOGUE)) - codes_of(ignore))
