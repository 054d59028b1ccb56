"""A checkpoint directory, moved into a new one: whole, or not at all.

Never writes into the source, and never leaves a part of the new directory behind.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.layouts.distributed import pieces_of_files
from ckptmove.checkpoint.layouts.listing import require_unchanged
from ckptmove.checkpoint.layouts.merge import split_plan
from ckptmove.checkpoint.layouts.reading import read_directory
from ckptmove.checkpoint.opening import naming, open_checkpoint
from ckptmove.conversion.file import Conversion, write_checkpoint
from ckptmove.errors import OutputExists, OutputIsSource
from ckptmove.io.contracts import CopySegment
from ckptmove.io.directory_sink import DirectorySink
from ckptmove.io.leftovers import clear_leftovers
from ckptmove.io.portable import shared_folder
from ckptmove.io.rewrite import write_segments
from ckptmove.io.source import open_source
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.checkpoint.layouts.distributed import DistributedFolder, PiecesOfFile
    from ckptmove.checkpoint.layouts.listing import ListedFile, Listing
    from ckptmove.checkpoint.layouts.reading import Directory
    from ckptmove.conversion.file import ConvertRequest
    from ckptmove.formats.dcp.checkpoint import DistributedCheckpoint
    from ckptmove.io.contracts import ByteSink, Progress
    from ckptmove.moves import ConvertResult, MovePlan


#: While some are being read or made durable, others are written; each holds a few blocks, and its pickle.
AT_ONCE: Final = 4


def convert_directory(request: ConvertRequest) -> ConvertResult:
    """Plan the conversion of a directory and carry it out.

    Errors as of :func:`ckptmove.api.convert`. Files that are no checkpoints are copied byte for byte, links are made
    anew, and permission bits stay. So are the pieces of a distributed checkpoint, whose CRCs are compared meanwhile.
    """
    path, target = request.path, request.target
    with naming(path):
        distributed: list[tuple[DistributedFolder, DistributedCheckpoint]] = []
        directory = read_directory(
            path, request.limits, objects=False, visit_distributed=lambda *found: distributed.append(found)
        )
        conversion = Conversion(request, directory.inventory, directory.no_devices)
        if not conversion.is_writing:
            return conversion.result()
        _require_apart(path, target)
        clear_leftovers(Path(target).parent)
        if not request.force and os.path.lexists(target):
            raise OutputExists(target)
        pieces: dict[str, PiecesOfFile] = {}
        for part, container in distributed:
            pieces |= pieces_of_files(part, container)
        with DirectorySink(target, directory.listing.names, force=request.force) as sink:
            writer = _Writer(directory, conversion, request, sink, pieces if request.check else {})
            writer.run()
            sink.commit(request.settle)
    if writer.unchecked:
        unchecked = ", ".join(sorted(writer.unchecked))
        conversion.notes.append(f"without CRCs, so that their bytes were copied unchecked: {unchecked}")
    if sink.leftover is not None:
        conversion.notes.append(f"the directory that was replaced could not be removed whole: {sink.leftover}")
    return conversion.result(writer.written)


def _require_apart(path: str, output: str) -> None:
    """Refuse an output that is the source, in it or around it."""
    source, target = os.path.realpath(path), os.path.realpath(output)
    if source == target:
        raise OutputIsSource(output)
    shared = shared_folder(source, target)
    if shared == source:
        raise OutputIsSource(output, "lies inside of the source")
    if shared == target:
        raise OutputIsSource(output, "holds the source")


class _Stopped(Exception):
    """A file is not finished, because another one has failed or the user has had enough."""


class _Writer:
    """Writes the whole directory, some files at a time.

    Attributes:
        written: bytes so far.
        unchecked: paths of the checkpoints whose bytes have no CRCs.
    """

    def __init__(
        self,
        directory: Directory,
        conversion: Conversion,
        request: ConvertRequest,
        sink: DirectorySink,
        pieces: Mapping[str, PiecesOfFile],
    ) -> None:
        self._pieces = pieces
        self._listing: Listing = directory.listing
        self._plans = {
            part.file.path: own
            for part, own in zip(directory.parts, split_plan(conversion.plan, directory.parts), strict=True)
            if part.file.container != "dcp"  # several files, in which no device stands
        }
        self._overflowed = conversion.overflowed.append
        self._request = request
        self._sink = sink
        self._left = iter(directory.listing.files)
        self._total = sum(file.size_bytes for file in directory.listing.files)
        self._lock = Lock()
        self._is_over = False
        self.written = 0
        self.unchecked: list[str] = []

    def run(self) -> None:
        """Write everything.

        Raises:
            SourceChanged: a file is not the one any more that the plan was made for.
            CkptMoveError: as :func:`ckptmove.conversion.file.write_checkpoint`; whatever fails first ends all of it.
        """
        self._sink.reserve(self._total)
        for folder in self._listing.folders:
            self._sink.folder(folder.path, folder.mode)
        for link in self._listing.links:
            self._sink.link(link.path, link.target)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for worker in [pool.submit(self._work) for _ in range(AT_ONCE)]:
                    worker.result()
            finally:
                self._is_over = True

    def _work(self) -> None:
        """Write one file after the other, as long as there are any."""
        try:
            while (file := self._next()) is not None:
                with self._sink.file(file.path, file.mode) as new:
                    self._write(file, new)
        except _Stopped:
            return
        except BaseException:
            self._is_over = True
            raise

    def _next(self) -> ListedFile | None:
        with self._lock:
            return None if self._is_over else next(self._left, None)

    def _write(self, file: ListedFile, sink: ByteSink) -> None:
        """Write one file as its plan has it, or as it is."""
        full = self._listing.full(file.path)
        plan = self._plans.get(file.path)
        with naming(full):
            require_unchanged(self._listing, file)
            if plan is None:
                self._copy(full, self._pieces.get(file.path), sink)
            else:
                self._convert(file.path, plan, sink)
            require_unchanged(self._listing, file)

    def _convert(self, path: str, plan: MovePlan, sink: ByteSink) -> None:
        request = replace(self._request, path=self._listing.full(path), progress=self._counted())
        with open_checkpoint(request.path, request.limits) as checkpoint:
            if request.check and not checkpoint.container.has_checksums():
                self.unchecked.append(path)
            write_checkpoint(checkpoint, plan, sink, request, self._overflowed)

    def _copy(self, full: str, pieces: PiecesOfFile | None, sink: ByteSink) -> None:
        source = open_source(full)
        try:
            count = self._counted()
            limits = self._request.limits
            checks = () if pieces is None else pieces.checks(source, limits, lambda: count(0, source.size))
            write_segments(source, [CopySegment(Span(0, source.size), checks)], sink, full, count)
        finally:
            source.close()

    def _counted(self) -> Progress:
        """The progress of one file, as a part of that of all; it ends the file where all is over."""
        before = 0

        def count(done: int, _of_the_file: int) -> None:
            nonlocal before
            with self._lock:
                if self._is_over:
                    raise _Stopped
                self.written += done - before
                before = done
                if self._request.progress is not None:
                    self._request.progress(self.written, self._total)

        return count
