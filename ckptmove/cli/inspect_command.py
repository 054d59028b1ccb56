"""The ``inspect`` command."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptmove.api import functions as api
from ckptmove.cli.batch import for_each
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.answers import InspectAnswer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.api.functions import InspectRequest
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
