"""A checkpoint directory, moved into a new one: whole, or not at all.

Never writes into the source, and never leaves a part of the new directory behind.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ckptmove.checkpoint import naming, open_checkpoint
from ckptmove.contracts import CopySegment
from ckptmove.conversion import write_checkpoint
from ckptmove.errors import OutputExists, OutputIsSource
from ckptmove.layouts.listing import require_unchanged
from ckptmove.layouts.merge import split_plan
from ckptmove.layouts.reading import read_directory
from ckptmove.model import Span
from ckptmove.moves import ConvertResult
from ckptmove.notes import conversion_notes, no_devices, overflow_note
from ckptmove.plan import plan_move
from ckptmove.rewrite import write_segments
from ckptmove.streams.directory_sink import DirectorySink
from ckptmove.streams.source import open_source

if TYPE_CHECKING:
    from ckptmove.contracts import ByteSink, Progress
    from ckptmove.layouts.listing import ListedFile, Listing
    from ckptmove.layouts.reading import Directory
    from ckptmove.model import Limits
    from ckptmove.moves import MovePlan, MoveRequest


def convert_directory(
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
    """Plan the conversion of a directory and carry it out.

    Arguments and errors as of :func:`ckptmove.api.convert`, and ``beside``: the output where none was asked for.
    Files that are no checkpoints are copied byte for byte, links are made anew, and permission bits stay.
    """
    began = time.perf_counter()
    target = output or beside
    with naming(path):
        directory = read_directory(path, limits)
        plan = plan_move(directory.inventory, request)
        notes = tuple(conversion_notes(directory.inventory, plan))
        reason = _no_devices(directory) if plan.is_empty else ""
        if reason:
            notes += (reason if output is not None else f"{reason}; nothing was written, -o OUT copies the directory",)
        if dry_run or (reason and output is None):
            seconds = time.perf_counter() - began
            return ConvertResult(plan=plan, output=None, bytes_copied=0, seconds=seconds, notes=notes)
        _require_apart(path, target)
        if not force and os.path.lexists(target):
            raise OutputExists(target)
        listing = directory.listing
        with DirectorySink(target, listing.names, force=force) as sink:
            for folder in listing.folders:
                sink.folder(folder.path, folder.mode)
            for link in listing.links:
                sink.link(link.path, link.target)
            writer = _Writer(directory, plan, limits, progress)
            for file in listing.files:
                with sink.file(file.path, file.mode) as one:
                    writer.write(file, one)
            sink.commit()
    if writer.overflowed:
        notes += (overflow_note(sum(writer.overflowed)),)
    if writer.unchecked:
        notes += (f"without CRCs, so that their bytes were copied unchecked: {', '.join(writer.unchecked)}",)
    if sink.leftover is not None:
        notes += (f"the directory that was replaced could not be removed whole: {sink.leftover}",)
    seconds = time.perf_counter() - began
    return ConvertResult(plan=plan, output=target, bytes_copied=writer.written, seconds=seconds, notes=notes)


def _no_devices(directory: Directory) -> str:
    """Why there is no device in any of the files; empty where there is one."""
    reasons = [no_devices(part.inventory) for part in directory.parts]
    return reasons[0] if all(reasons) else ""


def _require_apart(path: str, output: str) -> None:
    """Refuse an output that is the source, in it or around it."""
    source, target = os.path.realpath(path), os.path.realpath(output)
    if source == target:
        raise OutputIsSource(output)
    shared = os.path.commonpath([source, target])
    if shared == source:
        raise OutputIsSource(output, "lies inside of the source")
    if shared == target:
        raise OutputIsSource(output, "holds the source")


class _Writer:
    """Writes file after file.

    Attributes:
        written: bytes so far.
        unchecked: paths of the checkpoints whose bytes have no CRCs.
        overflowed: for each tensor that was cast, how many of its values were too large.
    """

    def __init__(self, directory: Directory, plan: MovePlan, limits: Limits, progress: Progress | None) -> None:
        self._listing: Listing = directory.listing
        self._plans = {
            part.file.path: own
            for part, own in zip(directory.parts, split_plan(plan, directory.parts), strict=True)
            if part.file.container != "dcp"  # several files, in which no device stands
        }
        self._limits = limits
        self._progress = progress
        self._total = sum(file.size_bytes for file in directory.listing.files)
        self.written = 0
        self.unchecked: list[str] = []
        self.overflowed: list[int] = []

    def write(self, file: ListedFile, sink: ByteSink) -> None:
        """Write one file as its plan has it, or as it is.

        Raises:
            SourceChanged: it is not the file any more that the plan was made for.
        """
        full = self._listing.full(file.path)
        plan = self._plans.get(file.path)
        with naming(full):
            require_unchanged(self._listing, file)
            self.written += self._copy(full, sink) if plan is None else self._convert(file.path, plan, sink)
            require_unchanged(self._listing, file)

    def _convert(self, path: str, plan: MovePlan, sink: ByteSink) -> int:
        full = self._listing.full(path)
        with open_checkpoint(full, self._limits) as checkpoint:
            if not checkpoint.container.has_checksums():
                self.unchecked.append(path)
            return write_checkpoint(checkpoint, plan, sink, full, self._counted(), self.overflowed.append)

    def _copy(self, full: str, sink: ByteSink) -> int:
        source = open_source(full)
        try:
            return write_segments(source, [CopySegment(Span(0, source.size))], sink, full, self._counted())
        finally:
            source.close()

    def _counted(self) -> Progress | None:
        progress, written, total = self._progress, self.written, self._total
        return None if progress is None else lambda done, _of_the_file: progress(written + done, total)
