"""The ``verify`` command."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptmove.cli.batch import for_each
from ckptmove.cli.outcome import NO, YES, failure_of
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.answers import VerifyAnswer
from ckptmove.errors import ReportFailed, UsageError
from ckptmove.verification.run import verify_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.cli.render.answers import Summary
    from ckptmove.cli.render.renderer import Renderer
    from ckptmove.cli.selection import Selection
    from ckptmove.verification.request import VerifyRequest


def run_verify(
    requests: Sequence[VerifyRequest], renderer: Renderer, *, selection: Selection, strict: bool, junit: str | None
) -> int:
    """Verify each checkpoint, write its verdict, and return the highest exit code.

    Args:
        requests: one for each checkpoint; equal but for the path.
        renderer: writes the verdicts.
        selection: the findings to report.
        strict: whether warnings, and a resume that is not proven, are failures.
        junit: file for the verdicts as JUnit XML, or None.

    Raises:
        UsageError: if ``--against`` is set for several checkpoints; and as :func:`ckptmove.api.verify`.
        OutputIsNoReport: if the JUnit file is a checkpoint, or another file that is not XML.
    """
    against = requests[0].against
    if against is not None and len(requests) > 1:
        raise UsageError(f"--against names the original of one checkpoint, not of {len(requests)}")
    reports: list[Renderer] = [renderer]
    if junit is not None:
        from ckptmove.cli.render.junit import JUnitRenderer

        sources = [*(request.path for request in requests), *([against] if against else [])]
        reports.insert(0, JUnitRenderer(junit, sources))
    answers: list[VerifyAnswer] = []

    def work(request: VerifyRequest) -> tuple[int, tuple[()]]:
        with ProgressBar(wanted=renderer.shows_progress) as progress:
            result = verify_checkpoint(request, progress=progress, stage=progress.stage)
        answer = VerifyAnswer(request, replace(result, findings=selection.among(result.findings)), strict)
        answers.append(answer)
        for report in reports:
            report.verify(answer)
        return (NO if answer.fails else YES), ()

    summary = for_each("verify", requests, work, renderer)
    # With --strict, a checkpoint that is not proven has not passed.
    unproven = 0 if strict else sum(one.result.passed and not one.result.proven for one in answers)
    summary = summary._replace(unproven=unproven)
    for report in reports:
        summary = _finish(report, summary, renderer)
    return summary.exit_code


def _finish(report: Renderer, summary: Summary, renderer: Renderer) -> Summary:
    """Finish a report; the error of one that cannot be written becomes one of the command, whose verdicts are kept."""
    try:
        report.finish(summary)
    except ReportFailed as error:
        failure = failure_of(error)
        renderer.failure(failure)
        code = max(summary.exit_code, failure.exit_code)
        return summary._replace(exit_code=code, failures=(*summary.failures, failure))
    return summary
