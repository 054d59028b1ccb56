"""Write a new checkpoint directory, completely or not at all."""

from __future__ import annotations

from contextlib import closing
from threading import Lock
from typing import TYPE_CHECKING, Final, cast

from ckptmove.checkpoint.merge import split_plan
from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.parts import FilePart
from ckptmove.conversion.remap.folder import RemappedFolder
from ckptmove.io.at_once import Workers, go_on
from ckptmove.io.contracts import CopySegment
from ckptmove.io.cores import cores
from ckptmove.io.directory_sink import DirectorySink
from ckptmove.io.new_output import require_new_folder
from ckptmove.io.part import MemorySource
from ckptmove.io.rewrite import write_segments
from ckptmove.model import Span

if TYPE_CHECKING:
    from ckptmove.assembled.dcp_folder import PiecesOfFile
    from ckptmove.assembled.part import AssembledPart
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.conversion.conversion import Conversion
    from ckptmove.io.contracts import ByteSink, Progress
    from ckptmove.io.listing import ListedFile, Listing
    from ckptmove.moves import MovePlan


#: Least number of files written at a time by default: while some are read or synced to disk, others are written.
AT_ONCE: Final = 4


def write_directory(conversion: Conversion, checkpoint: OpenCheckpoint, listing: Listing) -> int:
    """Write the new directory; return the number of bytes.

    Files that are not checkpoints are copied byte for byte. Links are created again, and permission bits are kept.
    Pieces of a distributed checkpoint are copied and compared with their CRCs.
    """
    request = conversion.request
    require_new_folder(request.path, request.target, force=request.force)
    remapped = conversion.remapped
    new = None if remapped is None else RemappedFolder(conversion, remapped, checkpoint)
    names = listing.names if new is None else listing.names - new.removed
    with DirectorySink(request.target, names, force=request.force) as sink:
        writer = _DirectoryWriter(conversion, checkpoint, listing, sink, new)
        writer.run()
        conversion.prove(sink.place)
        sink.commit(request.settle)
    if sink.leftover is not None:
        conversion.notes.append(f"the replaced directory could not be removed completely: {sink.leftover}")
    return writer.written


class _DirectoryWriter:
    """Writes the directory, several files at a time."""

    def __init__(
        self,
        conversion: Conversion,
        checkpoint: OpenCheckpoint,
        listing: Listing,
        sink: DirectorySink,
        new: RemappedFolder | None,
    ) -> None:
        self._conversion, self._request, self._new = conversion, conversion.request, new
        self._listing, self._sink = listing, sink
        self._pieces: dict[str, PiecesOfFile] = {}
        self._plans: dict[str, tuple[FilePart, MovePlan]] = {}
        moves = conversion.plan if new is None else conversion.plan._replace(edits=(), flags=())
        for part, plan in zip(checkpoint.parts, split_plan(moves, checkpoint.parts), strict=True):
            if isinstance(part, FilePart):
                self._plans[part.name] = part, plan
            elif self._request.check:  # no device is stored in its files
                self._pieces |= cast("AssembledPart", part).pieces_of_files()
        self._removed = frozenset[str]() if new is None else new.removed
        files = [file for file in listing.files if file.path not in self._removed]
        self._files_left = files
        self._total = sum(file.size_bytes for file in files)
        self._lock = Lock()
        self.written = 0

    def run(self) -> None:
        """Write everything."""
        self._sink.reserve(self._total)
        for folder in self._listing.folders:
            if folder.path not in self._removed:
                self._sink.folder(folder.path, folder.mode)
        for link in self._listing.links:
            if link.path not in self._removed:
                self._sink.link(link.path, link.target)
        Workers(self._files_left).run(self._write_file, self._request.jobs or max(AT_ONCE, cores()))

    def _write_file(self, file: ListedFile) -> None:
        with self._sink.file(file.path, file.mode) as new:
            self._write(file, new)

    def _write(self, file: ListedFile, sink: ByteSink) -> None:
        """Write one file, changed as planned or unchanged."""
        with naming(self._listing.full(file.path)):
            self._listing.require_unchanged(file)
            segments = None if self._new is None else self._new.segments.get(file.path)
            if segments is not None:
                source, overflowed = MemorySource(file.path, b""), self._conversion.overflowed.append
                write_segments(source, segments, sink, self._counted(), overflowed)
            elif file.path in self._plans:
                self._convert(*self._plans[file.path], sink)
            else:
                self._copy(file.path, sink)
            self._listing.require_unchanged(file)

    def _convert(self, part: FilePart, plan: MovePlan, sink: ByteSink) -> None:
        if self._request.check and not part.has_own_checksums:
            self._conversion.unchecked.append(part.name)
        overflowed = self._conversion.overflowed.append
        # The tree of the file is read again here, because the trees of all files together would not fit into memory.
        with part.content() as (container, machine):
            segments = self._conversion.lay_out(container, machine, plan)
            write_segments(container.source, segments, sink, self._counted(), overflowed)

    def _copy(self, path: str, sink: ByteSink) -> None:
        pieces, count = self._pieces.get(path), self._counted()
        with closing(self._listing.open(path)) as source:
            limits = self._request.limits
            checks = () if pieces is None else pieces.checks(source, limits, lambda: count(0, source.size))
            write_segments(source, [CopySegment(Span(0, source.size), checks)], sink, count)

    def _counted(self) -> Progress:
        """Progress of one file as a part of the total; it raises CallStopped once another file has failed."""
        before = 0

        def count(done: int, _of_the_file: int) -> None:
            nonlocal before
            go_on()
            with self._lock:
                self.written += done - before
                before = done
                if self._request.progress is not None:
                    self._request.progress(self.written, self._total)

        return count
