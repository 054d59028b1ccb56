"""A checkpoint in one file, moved into another.

Never decides on a move: ``plan`` does.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ckptmove.checkpoint import naming, open_checkpoint
from ckptmove.errors import OutputExists, OutputIsFolder, OutputIsSource
from ckptmove.moves import ConvertResult
from ckptmove.notes import conversion_notes, no_devices, overflow_note
from ckptmove.pickles.edits import apply_plan
from ckptmove.plan import plan_move
from ckptmove.rewrite import write_segments
from ckptmove.streams.sink import FileSink, same_file
from ckptmove.streams.source import is_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.checkpoint import Checkpoint
    from ckptmove.contracts import ByteSink, Progress, Segment
    from ckptmove.model import Limits
    from ckptmove.moves import MovePlan, MoveRequest


def convert_file(
    path: str,
    request: MoveRequest,
    output: str | None,
    beside: str,
    *,
    force: bool,
    dry_run: bool,
    progress: Progress | None,
    limits: Limits,
) -> ConvertResult:
    """Plan a conversion and carry it out.

    Arguments and errors as of :func:`ckptmove.api.convert`, and ``beside``: the output where none was asked for.
    """
    began = time.perf_counter()
    target = output or beside
    with naming(path), open_checkpoint(path, limits) as checkpoint:
        plan = plan_move(checkpoint.inventory, request)
        notes = tuple(conversion_notes(checkpoint.inventory, plan))
        reason = no_devices(checkpoint.inventory) if plan.is_empty else ""
        if reason:
            notes += (reason if output is not None else f"{reason}; nothing was written, -o OUT copies the file",)
        if dry_run or (reason and output is None):
            seconds = time.perf_counter() - began
            return ConvertResult(plan=plan, output=None, bytes_copied=0, seconds=seconds, notes=notes)
        require_output(path, target, beside, force=force)
        overflowed: list[int] = []
        with FileSink(target, force=force) as sink:
            written = write_checkpoint(checkpoint, plan, sink, path, progress, overflowed.append)
            sink.commit()
        if overflowed:
            notes += (overflow_note(sum(overflowed)),)
        if not checkpoint.container.has_checksums():
            notes += ("the file holds no CRCs: its bytes were copied unchecked",)
    seconds = time.perf_counter() - began
    return ConvertResult(plan=plan, output=target, bytes_copied=written, seconds=seconds, notes=notes)


def require_output(path: str, target: str, beside: str, *, force: bool) -> None:
    """Refuse a new file that cannot be one, before anything is written.

    Args:
        path: the source.
        target: the new file.
        beside: what it would be called by default.
        force: whether an existing one is replaced.

    Raises:
        OutputIsFolder, OutputIsSource, OutputExists: as they say.
    """
    if is_folder(target) or target.endswith(os.sep):
        raise OutputIsFolder(target, os.path.join(target, os.path.basename(beside)))  # noqa: PTH118, PTH119  # a path may become a URL: it stays text
    if same_file(path, target):
        raise OutputIsSource(target)
    if not force and os.path.lexists(target):
        raise OutputExists(target)


def write_checkpoint(
    checkpoint: Checkpoint,
    plan: MovePlan,
    sink: ByteSink,
    path: str,
    progress: Progress | None,
    overflowed: Callable[[int], None],
) -> int:
    """Write an open checkpoint, changed by its plan, into a sink; return the number of bytes.

    Args:
        checkpoint: the source.
        plan: that was made for it.
        sink: takes the bytes; whoever opened it commits it.
        path: the source, for errors.
        progress: told of bytes done and bytes in all.
        overflowed: told of the values of a tensor that were too large for the dtype that they were cast to.

    Raises:
        CrcMismatch, DamagedArchive, SourceChanged, AccessFailed: as the source.
        UneditablePickle: a change falls on a place that no pickler of Python writes.
        WriteFailed: as the sink.
    """
    segments = lay_out(checkpoint, plan)
    return write_segments(checkpoint.container.source, segments, sink, path, progress, overflowed)


def lay_out(checkpoint: Checkpoint, plan: MovePlan) -> tuple[Segment, ...]:
    """The segments of an open checkpoint, changed by its plan.

    Raises:
        CrcMismatch, DamagedArchive, UneditablePickle: as :func:`write_checkpoint`.
    """
    casts = {edit.storage: edit.cast for edit in plan.edits if edit.cast is not None}
    return checkpoint.container.lay_out(apply_plan(checkpoint.machine, plan), casts)
