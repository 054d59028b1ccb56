"""The findings to report: ``--select`` and ``--ignore``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.model import Finding


class Selection(NamedTuple):
    """The findings to report.

    Attributes:
        codes: their codes.
        ignored: all other codes of the catalogue, sorted.
    """

    codes: frozenset[str]
    ignored: tuple[str, ...] = ()

    def among(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """The selected findings, in their order."""
        return tuple(finding for finding in findings if finding.code in self.codes)


def selection(select: Sequence[str], ignore: Sequence[str]) -> Selection:
    """Select findings of the catalogue.

    Args:
        select: codes, first letters of codes (``D``) or names, separated by commas too; empty for all.
        ignore: likewise; removed from ``select``.

    Raises:
        UsageError: if a code is unknown.
    """
    from ckptmove.findings.catalogue import CATALOGUE
    from ckptmove.findings.codes import codes_of

    codes = (codes_of(select) or frozenset(CATALOGUE)) - codes_of(ignore)
    return Selection(codes, tuple(sorted(CATALOGUE.keys() - codes)))
