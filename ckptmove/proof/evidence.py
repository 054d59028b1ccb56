"""Result types of ``verify``: checks, sample size and verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from ckptmove.model import OneLine, fails_run
from ckptmove.text import amount

if TYPE_CHECKING:
    from ckptmove.model import Finding

CheckStatus: TypeAlias = Literal["passed", "failed", "skipped"]
Mode: TypeAlias = Literal["real", "simulated", "cpu"]
#: Beginning of :attr:`Verdict.unfixed` if no run shows whether the edits mend the code.
NOT_KNOWN: Final = "not known"


class CheckResult(NamedTuple):
    """The outcome of one check of ``verify``."""

    #: ``file``, ``restore``, ``placement``, ``structure``, ``numbers``, ``step``, ``parity``, ``fresh``, or ``case``
    #: with ``--case``, or ``script`` with ``--script``.
    name: str
    status: CheckStatus  # the outcome
    detail: str  # one line with figures, all failures with the fix, or the reason for a skip
    evidence: tuple[tuple[str, object], ...] = ()  # figures by name
    failures: tuple[str, ...] = ()  # the failures in the detail; empty if the check did not fail
    fix: str = ""  # the fix at the end of the detail: a command or an edit; empty without one


class SampleSize(NamedTuple):
    """How much of a checkpoint a sample covers."""

    asked: int  # requested number of parameters of each optimizer, and of other tensors
    parameters: int  # optimizer parameters in the sample
    of_parameters: int  # optimizer parameters in the checkpoint
    tensors: int  # tensors whose values were checked
    of_tensors: int  # tensors in the checkpoint

    @property
    def is_all(self) -> bool:
        """Whether the sample covers the whole checkpoint."""
        return (self.parameters, self.tensors) == (self.of_parameters, self.of_tensors)

    @property
    def of_all_parameters(self) -> str:
        """Parameter counts as text."""
        return f"{self.parameters:,} of {amount(self.of_parameters, 'parameter')}"

    @property
    def of_all_tensors(self) -> str:
        """Tensor counts as text."""
        return f"{self.tensors:,} of {amount(self.of_tensors, 'tensor')}"

    def __str__(self) -> str:
        """Both counts as text."""
        return f"{self.of_all_parameters}, {self.of_all_tensors}"


class FixedFile(NamedTuple):
    """A file of the user's code that ``verify --fix`` edited."""

    path: str  # path relative to the working directory
    fixes: int  # number of edits
    diff: str  # the edits as a unified diff. Bytes that are not UTF-8 are surrogate escapes.
    backup: str | None  # path of a copy without the edits; None if the file was not written (`--dry-run`)


class RankFault(NamedTuple):
    """A fault that one rank has found, or that ended it."""

    rank: int
    check: str  # name of the check
    fault: str  # the fault in one line


class RanksOfRun(NamedTuple):
    """The ranks of a run under torchrun."""

    ranks: int  # number of ranks
    shape: tuple[int, ...] = ()  # shape of the mesh; empty if nothing is sharded
    dims: tuple[str, ...] = ()  # names of its dimensions; empty if they have none
    saved_by: int | None = None  # number of ranks that saved the checkpoint, or None
    resharded: bool = False  # whether a rank has another part of a tensor than any rank saved
    faults: tuple[RankFault, ...] = ()  # faults of single ranks

    def updated(self, other: RanksOfRun) -> RanksOfRun:
        """These facts, with those that another has."""
        return self._replace(
            **{name: value for name, value in other._asdict().items() if value not in {None, (), False}}
        )

    def __str__(self) -> str:
        """The ranks, their mesh, and by how many ranks the checkpoint was saved."""
        dims = f": {', '.join(self.dims)}" if self.dims else ""
        mesh = f" ({'×'.join(map(str, self.shape))}{dims})" if self.shape else ""
        saved = f", saved by {self.saved_by}" if self.saved_by is not None else ""
        if self.resharded:
            is_other = self.saved_by not in {None, self.ranks}
            saved = f", resharded from {self.saved_by} to {self.ranks}" if is_other else f"{saved}, resharded"
        return f"{amount(self.ranks, 'rank')}{mesh}{saved}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict(OneLine):
    """The verdict of ``verify`` on one checkpoint."""

    path: str  # the path as the caller passed it
    target: str  # device of the step
    mode: Mode  # `real`, `simulated` or `cpu`
    passed: bool  # whether no check failed
    #: whether every optimizer was stepped on its own stored parameters and options, and its step used the stored
    #: state. False if a step was skipped, if anything replaced values that the file does not contain, or if only a
    #: sample was checked. A case proves the resume if the step was skipped, and makes this False if it does not prove
    #: it. A script proves it in place of the step. True for a checkpoint without optimizer state that equals its
    #: original (``against``).
    proven: bool
    checks: tuple[CheckResult, ...]  # results in the order of the report
    findings: tuple[Finding, ...]  # findings of the file
    sample: SampleSize | None = None  # size of the sample; None if everything was checked
    fixed: tuple[FixedFile, ...] = ()  # files that `--fix` edited
    #: why the case or script does not pass with these edits, or that this is not known; empty if it does, and without
    #: ``--fix``.
    unfixed: str = ""
    run: RanksOfRun | None = None  # the ranks, if torchrun started the command; else None
    #: what a resume also needs, and no check looks at: ``scheduler``, ``scaler`` and ``rng``, if the checkpoint holds
    #: them and no case or script runs; with one, ``position in the data``.
    not_looked_at: tuple[str, ...] = ()

    def fails(self, *, strict: bool) -> bool:
        """Whether the exit code is 1: a check failed, or with ``strict`` there is a warning or no proof."""
        return not self.passed or (strict and (not self.proven or fails_run(self.findings, strict=True)))

    def __str__(self) -> str:
        verdict = "failed" if not self.passed else "passed" if self.proven else "passed, but not proven"
        part = f", by a sample: {self.sample}" if self.sample is not None else ""
        mode = f" ({self.mode})" if self.mode != self.target else ""
        return f"{self.path}: {verdict} on {self.target}{mode}{part}"
