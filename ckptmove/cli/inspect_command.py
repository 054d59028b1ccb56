"""The ``inspect`` command."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from ckptmove.api import inspection as api
from ckptmove.checkpoint.trainers import is_spoiled
from ckptmove.cli.batch import for_each
from ckptmove.cli.outcome import NO, YES
from ckptmove.cli.progress import ProgressBar
from ckptmove.cli.render.renderer import InspectAnswer
from ckptmove.cli.streams import say
from ckptmove.errors import NotACheckpoint
from ckptmove.io.remote.address import Address
from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.api.inspection import Inspection, InspectRequest
    from ckptmove.cli.paths import Target, Targets
    from ckptmove.cli.render.renderer import Detail, Renderer
    from ckptmove.cli.seen import Seen
    from ckptmove.cli.selection import Selection
    from ckptmove.errors import CkptMoveError
    from ckptmove.io.contracts import Progress


#: Checkpoints at URLs that are read at once.
_REMOTE_JOBS: Final = 8


def run_inspect(
    found: Targets,
    request: InspectRequest,
    renderer: Renderer,
    *,
    selection: Selection,
    strict: bool,
    match: str | None,
    detail: Detail,
    jobs: int | None = None,
    seen: Seen | None = None,
) -> int:
    """Inspect each checkpoint, write its report, and return the highest exit code.

    Args:
        request: the options, without the path.
        match: glob of the names of tensors to list, or None.
        jobs: number of checkpoints read at once; None for 8 if several are at URLs, and 1 otherwise. CRCs of a single
            one are compared by as many threads; None for as many as there are cores.
        seen: the checkpoints to skip, or None.
    """
    targets = found.targets
    remote = sum(isinstance(target.path, Address) for target in targets)
    at_once = min(len(targets), jobs or (_REMOTE_JOBS if remote > 1 else 1))
    request = request._replace(jobs=1 if at_once > 1 else jobs)
    look = _Look(request, seen, is_versioned=renderer.is_stream or seen is not None)
    ahead = None
    if at_once > 1:
        from ckptmove.cli.ahead import Ahead  # imports concurrent.futures, which one checkpoint does not need

        ahead = Ahead(look, targets, at_once)
    skipped = left_out = 0

    def work(target: Target) -> tuple[int, Sequence[CkptMoveError]]:
        nonlocal skipped, left_out
        if ahead is not None:
            looked = ahead.take()
        else:
            with ProgressBar(wanted=renderer.shows_progress) as progress:
                looked = look(target, progress)
        if looked is None:
            skipped += 1
            return YES, ()
        own, version, inspection = looked
        if inspection is None:
            left_out += 1
            return YES, ()
        findings = selection.among(inspection.findings)
        tensors = inspection.inventory.tensors
        if match is not None:
            tensors = tuple(tensor for tensor in tensors if fnmatchcase(tensor.name, match))
        left = replace(inspection, findings=findings)
        answer = InspectAnswer(
            request=own,
            result=left,
            tensors=tensors,
            exit_code=NO if left.fails(strict=strict) else YES,
            detail=detail,
            strict=strict,
            # --skip-seen inspects it again: a file of it may be readable by then.
            version=None if inspection.unreadable else version,
            unprinted=selection.unprinted,
        )
        renderer.inspect(answer)
        return answer.exit_code, inspection.unreadable

    order: Iterable[Target] = ahead.as_completed() if ahead is not None and renderer.is_stream else targets
    summary = for_each("inspect", order, work, renderer, len(targets))
    if found.left_out + left_out:
        say(f"left out {amount(found.left_out + left_out, 'file')} without a checkpoint")
    return renderer.finish(
        summary._replace(checkpoints=len(targets) - left_out, good=summary.good - left_out, skipped=skipped)
    )


class _Look:
    """Inspects one checkpoint; several threads call it."""

    def __init__(self, request: InspectRequest, seen: Seen | None, *, is_versioned: bool) -> None:
        self._request, self._seen, self._is_versioned = request, seen, is_versioned

    def __call__(
        self, target: Target, progress: Progress | None = None
    ) -> tuple[InspectRequest, str | None, Inspection | None] | None:
        """Inspect a checkpoint.

        Returns:
            Its request, its fingerprint, and the result; no result for a file that a search found and that is not a
            checkpoint. None for a checkpoint that is skipped as seen.
        """
        if target.error is not None:
            raise target.error
        if self._is_versioned:
            from ckptmove.cli.paths import identified

            target = identified(target)
        if self._seen is not None and self._seen.has(target.path, target.version):
            return None
        request = self._request._replace(path=target.path, members=target.members)
        try:
            return request, target.version, api.inspect_checkpoint(request, progress)
        except NotACheckpoint as error:
            name = target.path.replace("\\", "/").rpartition("/")[2]
            if not target.is_found or target.members is not None or error.runs or is_spoiled(name, error.found):
                raise
            return request, None, None
