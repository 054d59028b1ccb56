"""A checkpoint in one file, moved into another.

Never decides on a move: ``plan`` does.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmove.checkpoint import naming, open_checkpoint
from ckptmove.errors import OutputExists, OutputIsFolder, OutputIsSource
from ckptmove.moves import ConvertResult
from ckptmove.notes import conversion_notes, no_devices, overflow_note
from ckptmove.pickles.edits import apply_plan
from ckptmove.plan import plan_move
from ckptmove.rewrite import write_segments
from ckptmove.segments import without_checks
from ckptmove.streams.leftovers import clear_leftovers
from ckptmove.streams.sink import FileSink, same_file
from ckptmove.streams.source import is_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.checkpoint import Checkpoint
    from ckptmove.contracts import ByteSink, Progress, Segment
    from ckptmove.model import Limits
    from ckptmove.moves import MovePlan, MoveRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """A conversion as it was asked for.

    Attributes:
        path: a file or a directory.
        move: what goes where.
        output: the new file or directory, or None.
        beside: the output where none was asked for.
        force: whether an existing output is replaced.
        dry_run: whether to stop after the plan.
        check: whether the bytes that are copied are compared with their CRCs.
        progress: told of bytes done and bytes in all.
        limits: what the file may ask for.
    """

    path: str
    move: MoveRequest
    output: str | None
    beside: str
    force: bool
    dry_run: bool
    check: bool
    progress: Progress | None
    limits: Limits

    @property
    def target(self) -> str:
        """Where the output goes."""
        return self.output or self.beside


def convert_file(request: ConvertRequest) -> ConvertResult:
    """Plan a conversion and carry it out.

    Errors as of :func:`ckptmove.api.convert`.
    """
    began = time.perf_counter()
    path, target = request.path, request.target
    with naming(path), open_checkpoint(path, request.limits) as checkpoint:
        plan, container = plan_move(checkpoint.inventory, request.move), checkpoint.inventory.container
        notes = tuple(conversion_notes(checkpoint.inventory, plan))
        reason = no_devices(checkpoint.inventory) if plan.is_empty else ""
        if reason:
            notes += (
                reason if request.output is not None else f"{reason}; nothing was written, -o OUT copies the file",
            )
        if request.dry_run or (reason and request.output is None):
            seconds = time.perf_counter() - began
            return ConvertResult(
                container=container, plan=plan, output=None, bytes_copied=0, seconds=seconds, notes=notes
            )
        require_output(request)
        overflowed: list[int] = []
        with FileSink(target, force=request.force) as sink:
            written = write_checkpoint(checkpoint, plan, sink, request, overflowed.append)
            sink.commit()
        if overflowed:
            notes += (overflow_note(sum(overflowed)),)
        if request.check and not checkpoint.container.has_checksums():
            notes += ("the file holds no CRCs: its bytes were copied unchecked",)
    seconds = time.perf_counter() - began
    return ConvertResult(
        container=container, plan=plan, output=target, bytes_copied=written, seconds=seconds, notes=notes
    )


def require_output(request: ConvertRequest) -> None:
    """Refuse a new file that cannot be one, before anything is written; clear up what others have left there.

    Raises:
        OutputIsFolder, OutputIsSource, OutputExists: as they say.
    """
    target = request.target
    clear_leftovers(Path(target).parent)
    if is_folder(target) or target.endswith(os.sep):
        raise OutputIsFolder(target, os.path.join(target, os.path.basename(request.beside)))  # noqa: PTH118, PTH119  # a path may become a URL: it stays text
    if same_file(request.path, target):
        raise OutputIsSource(target)
    if not request.force and os.path.lexists(target):
        raise OutputExists(target)


def write_checkpoint(
    checkpoint: Checkpoint,
    plan: MovePlan,
    sink: ByteSink,
    request: ConvertRequest,
    overflowed: Callable[[int], None],
) -> int:
    """Write an open checkpoint, changed by its plan, into a sink; return the number of bytes.

    Args:
        checkpoint: the source.
        plan: that was made for it.
        sink: takes the bytes; whoever opened it commits it.
        request: its path for errors, whether to check, and whom to tell of the progress.
        overflowed: told of the values of a tensor that were too large for the dtype that they were cast to.

    Raises:
        CrcMismatch, DamagedArchive, SourceChanged, AccessFailed: as the source.
        UneditablePickle: a change falls on a place that no pickler of Python writes.
        WriteFailed: as the sink.
    """
    segments = lay_out(checkpoint, plan, request)
    return write_segments(checkpoint.container.source, segments, sink, request.path, request.progress, overflowed)


def lay_out(checkpoint: Checkpoint, plan: MovePlan, request: ConvertRequest) -> tuple[Segment, ...]:
    """The segments of an open checkpoint, changed by its plan.

    Raises:
        CrcMismatch, DamagedArchive, UneditablePickle: as :func:`write_checkpoint`.
    """
    casts = {edit.storage: edit.cast for edit in plan.edits if edit.cast is not None}
    segments = checkpoint.container.lay_out(apply_plan(checkpoint.machine, plan), casts)
    return segments if request.check else without_checks(segments)
