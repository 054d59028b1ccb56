"""The ``verify`` command."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptmove.cli.batch import for_each
from ckptmove.cli.config import ALLOWS_CODE
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.ranks import on_ranks, own_rank, require_one
from ckptmove.cli.render.renderer import VerifyAnswer
from ckptmove.cli.signals import settle
from ckptmove.errors import CkptMoveError, UsageError
from ckptmove.proof.checks import skipped
from ckptmove.proof.downloading import downloaded, require_local
from ckptmove.training.run import verify_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptmove.cli.render.renderer import Renderer
    from ckptmove.cli.selection import Selection
    from ckptmove.proof.evidence import Verdict
    from ckptmove.proof.request import VerifyRequest

#: Checks that step the file's own optimizer.
_STEPS: Final = frozenset({"step", "parity", "fresh"})


def run_verify(
    requests: Sequence[VerifyRequest],
    renderer: Renderer,
    *,
    failures: Mapping[str, CkptMoveError],
    selection: Selection,
    strict: bool,
    fix: bool,
    dry_run: bool,
    withheld: Mapping[str, str],
) -> int:
    """Verify each checkpoint, write its verdict, and return the highest exit code.

    Args:
        requests: one for each checkpoint; equal but for the path and what is excluded below it.
        failures: errors of the paths that a search found and that cannot be read, by path.
        withheld: code of the project that may not run: for each key, the option that allows it.
    """
    if requests[0].against is not None and len(requests) > 1:
        raise UsageError(f"--against names the original of one checkpoint, not of {len(requests)}")
    _require_fixable(requests, fix=fix, dry_run=dry_run)
    answers: list[VerifyAnswer] = []

    rank = own_rank()
    if rank is not None:
        require_one(requests, fix=fix)
        if not rank.is_first:
            rank.attend(requests[0])
            return YES
    for one in requests:
        require_local(one)

    def verified(request: VerifyRequest) -> Verdict:
        with ProgressBar(wanted=renderer.shows_progress) as progress:
            verify = verify_checkpoint if rank is None else on_ranks(rank)
            return _without_code(verify(request, progress=progress, stage=progress.stage), withheld)

    def local(request: VerifyRequest) -> VerifyRequest:
        with ProgressBar(wanted=renderer.shows_progress) as progress:
            return downloaded(request, progress, settle)

    def work(request: VerifyRequest) -> tuple[int, tuple[()]]:
        if request.path in failures:
            raise failures[request.path]
        request = local(request)
        result = _fixed(request, verified, renderer, dry_run=dry_run) if fix else verified(request)
        found = replace(result, findings=selection.among(result.findings))
        answer = VerifyAnswer(request, found, strict, dry_run, selection.unprinted)
        answers.append(answer)
        renderer.verify(answer)
        return (NO if answer.fails else YES), ()

    if len(requests) == 1 and not failures:  # its error ends the command, with a hint that needs the command line
        requests = [local(requests[0])]
    summary = for_each("verify", requests, work, renderer, len(requests))
    # With --strict, a checkpoint that is not proven has not passed.
    unproven = 0 if strict else sum(one.result.passed and not one.result.proven for one in answers)
    return renderer.finish(summary._replace(unproven=unproven))


def _without_code(result: Verdict, withheld: Mapping[str, str]) -> Verdict:
    """The verdict, with the checks skipped that need code of the project which may not run."""
    if not withheld:
        return result
    reasons = {
        name: f"not run: only pyproject.toml names this code; type {option}, or set {ALLOWS_CODE}=1"
        for name, option in withheld.items()
    }
    stepped = reasons.pop("optimizer", None)  # its class is not the one that was detected
    made = [
        one if stepped is None or one.name not in _STEPS or one.status != "passed" else skipped(one.name, stepped)
        for one in result.checks
    ]
    checks = (*made, *(skipped(name, reason) for name, reason in reasons.items()))
    return replace(result, checks=checks, passed=all(one.status != "failed" for one in checks), proven=False)


def _require_fixable(requests: Sequence[VerifyRequest], *, fix: bool, dry_run: bool) -> None:
    if dry_run and not fix:
        raise UsageError("--dry-run prints the patch of --fix: add --fix")
    if fix and not requests[0].runs_training:
        raise UsageError("--fix edits your training code: add --script FILE.py, or --case FILE.py:FUNC")
    if fix and len(requests) > 1:
        raise UsageError(f"--fix takes one checkpoint, not {len(requests)}")


def _fixed(
    request: VerifyRequest,
    verified: Callable[[VerifyRequest], Verdict],
    renderer: Renderer,
    *,
    dry_run: bool,
) -> Verdict:
    """The verdict on the user's files, after the edits if they were written."""
    from ckptmove.training.fixes.apply import find_fixes, fixed_files, write  # used for --fix only

    fixes = find_fixes(request, verified)
    edited = fixed_files(fixes.files)
    if dry_run:
        return replace(fixes.first, fixed=edited, unfixed=fixes.unfixed)
    renderer.edits(edited)
    return replace(fixes.last, fixed=write(fixes.files), unfixed=fixes.unfixed)
