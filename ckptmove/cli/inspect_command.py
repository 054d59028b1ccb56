"""The ``inspect`` command."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from ckptmove.api import functions as api
from ckptmove.cli.batch import for_each
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.answers import InspectAnswer
from ckptmove.io.remote.address import Address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.functions import InspectRequest
    from ckptmove.api.results import Inspection
    from ckptmove.cli.ahead import Ahead
    from ckptmove.cli.render.answers import Detail
    from ckptmove.cli.render.renderer import Renderer
    from ckptmove.cli.selection import Selection
    from ckptmove.errors import CkptMoveError


#: Checkpoints at URLs that are read at once.
_REMOTE_JOBS: Final = 8


def run_inspect(
    requests: Sequence[InspectRequest],
    renderer: Renderer,
    *,
    selection: Selection,
    strict: bool,
    match: str | None,
    detail: Detail,
    jobs: int | None = None,
) -> int:
    """Inspect each checkpoint, write its report, and return the highest exit code.

    Args:
        requests: one for each checkpoint.
        renderer: writes the reports.
        selection: the findings to report.
        strict: whether warnings are failures.
        match: glob of the names of tensors to list, or None.
        detail: optional parts of the report.
        jobs: number of checkpoints read at once; None for 8 if several are at URLs, and 1 otherwise.
    """
    remote = sum(isinstance(request.path, Address) for request in requests)
    at_once = jobs or (_REMOTE_JOBS if remote > 1 else 1)
    ahead = _ahead(requests, at_once) if at_once > 1 else None

    def work(request: InspectRequest) -> tuple[int, Sequence[CkptMoveError]]:
        if ahead is not None:
            found = ahead.take()
        else:
            with ProgressBar(wanted=renderer.shows_progress) as progress:
                found = api.inspect_checkpoint(request, progress)
        findings = selection.among(found.findings)
        tensors = found.inventory.tensors
        if match is not None:
            tensors = tuple(tensor for tensor in tensors if fnmatchcase(tensor.name, match))
        left = replace(found, findings=findings)
        answer = InspectAnswer(
            request=request,
            inspection=left,
            tensors=tensors,
            exit_code=NO if left.fails(strict=strict) else YES,
            detail=detail,
            strict=strict,
        )
        renderer.inspect(answer)
        return answer.exit_code, found.unreadable

    return renderer.finish(for_each("inspect", requests, work, renderer))


def _ahead(requests: Sequence[InspectRequest], jobs: int) -> Ahead[InspectRequest, Inspection]:
    from ckptmove.cli.ahead import Ahead  # imports concurrent.futures, which one checkpoint does not need

    return Ahead(api.inspect_checkpoint, requests, jobs)
