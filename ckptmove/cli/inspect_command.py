"""The ``inspect`` command."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptmove import api
from ckptmove.cli.batch import for_each
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.answers import Expectation, InspectAnswer
from ckptmove.torch_facts.devices import NO_DEVICE
from ckptmove.verification.evidence import fails_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api import InspectRequest
    from ckptmove.cli.render.answers import Detail
    from ckptmove.cli.render.renderer import Renderer
    from ckptmove.cli.selection import Selection
    from ckptmove.errors import CkptMoveError


def run_inspect(
    requests: Sequence[InspectRequest],
    renderer: Renderer,
    *,
    selection: Selection,
    strict: bool,
    match: str | None,
    detail: Detail,
) -> int:
    """Inspect each checkpoint, write its report, and return the highest exit code."""

    def work(request: InspectRequest) -> tuple[int, Sequence[CkptMoveError]]:
        with ProgressBar(wanted=renderer.shows_progress) as progress:
            found = api.inspect_checkpoint(request, progress)
        expectation = None
        if request.expect is not None and found.plan is not None:
            unplaced = sum(tensor.device == NO_DEVICE for tensor in found.inventory.tensors)
            expectation = Expectation(request.expect, found.plan.edits, unplaced)
        findings = selection.among(found.findings)
        tensors = found.inventory.tensors
        if match is not None:
            tensors = tuple(tensor for tensor in tensors if fnmatchcase(tensor.name, match))
        is_no = fails_run(findings, strict=strict) or (expectation is not None and bool(expectation.misplaced))
        answer = InspectAnswer(
            request=request,
            inspection=replace(found, findings=findings),
            tensors=tensors,
            expectation=expectation,
            exit_code=NO if is_no else YES,
            detail=detail,
        )
        renderer.inspect(answer)
        return answer.exit_code, found.unreadable

    return renderer.finish(for_each("inspect", requests, work, renderer))
