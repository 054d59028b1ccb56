"""The findings to report: ``--select`` and ``--ignore``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.model import Finding


#: Notes that nearly every healthy checkpoint has, so that a report for people has them only on request.
ON_REQUEST: Final = frozenset({"R302"})


class Selection(NamedTuple):
    """The findings to report."""

    codes: frozenset[str]  # their codes
    ignored: tuple[str, ...] = ()  # all other codes of the catalogue, sorted
    unprinted: frozenset[str] = frozenset()  # codes that only data (JSON, SARIF) has

    def among(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """The selected findings, in their order."""
        return tuple(finding for finding in findings if finding.code in self.codes)


def selection(select: Sequence[str], ignore: Sequence[str], *, everything: bool = False) -> Selection:
    """Select findings of the catalogue.

    Args:
        select: codes, first letters of codes (``D``) or names, separated by commas too; empty for all.
        ignore: likewise; removed from ``select``.
        everything: whether to print also what is printed on request only.
    """
    from ckptmove.findings.catalogue import CATALOGUE

    named = ignored = frozenset[str]()
    if select or ignore:
        from ckptmove.findings.codes import codes_of

        named, ignored = codes_of(select), codes_of(ignore)
    codes = (named or frozenset(CATALOGUE)) - ignored
    unprinted = frozenset() if everything else ON_REQUEST - named
    return Selection(codes, tuple(sorted(CATALOGUE.keys() - codes)), unprinted)
