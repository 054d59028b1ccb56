"""The faults of the ranks of a mesh proof as one check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.proof.checks import Offenders, failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.proof.evidence import CheckResult

#: Name of the last answer of a rank: whether it ended without an error.
RANK: Final = "rank"


def rank_failure(
    check: str, faults: Sequence[list[str]], size: int, fix: str = "", /, *, named: bool = True, **figures: object
) -> CheckResult:
    """A failed check, with the faults of all ranks; a fault of all ranks occurs once."""
    by_text: dict[str, list[int]] = {}
    for rank, own in enumerate(faults):
        for fault in own:
            by_text.setdefault(fault, []).append(rank)
    offenders = Offenders()
    for fault, ranks in sorted(by_text.items(), key=lambda pair: pair[1]):
        offenders.add(f"{ranks_text(ranks, size)}: {fault}" if named else fault)
    figures = {**figures, "faults": len(by_text)}
    if named:
        figures["ranks"] = [rank for rank, own in enumerate(faults) if own]
    return failed(check, offenders.failures(), fix, **figures)


def ranks_text(ranks: Sequence[int], size: int) -> str:
    """Ranks in words: ``rank 3``, ``ranks 1, 2``, ``all ranks``."""
    if len(ranks) == size > 1:
        return "all ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
