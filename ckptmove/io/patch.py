"""Change a file in place, completely or not at all, and roll back interrupted changes.

No byte changes before the journal that can restore it is durable.

A process that changes a file or rolls back a change holds the lock of the file, which the system releases when the
process ends. A journal next to a file that is not locked was left by a process that has ended, or came with the folder.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import (
    BeingConverted,
    ChangeFailed,
    JournalInTheWay,
    RollbackFailed,
    SourceChanged,
    WriteFailed,
    reason_of,
)
from ckptmove.io.journal import ANCHOR_BYTES, ChangedRange, Journal, decode
from ckptmove.io.locations import home_of, journal_path
from ckptmove.io.outputs import do_nothing
from ckptmove.io.portable import UNTRUSTED, open_file, own_user, sync_folder
from ckptmove.io.source import stamp_of
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.io.changes import Patch
    from ckptmove.io.source import Stamp

#: A long run of zeros may come from a crash; a shorter one can be a saved number.
_LOST: Final = re.compile(rb"\0{32,}")

_UNDONE: Final = "rolls back a conversion in place that was interrupted"
_NOT_BEGUN: Final = "removes the journal of a conversion in place that was interrupted before it changed the file"
_OUTDATED: Final = "removes the journal of an interrupted conversion in place: the file was rewritten since"


def apply_patch(path: str, patch: Patch, before: Stamp, settle: Callable[[], None] = do_nothing) -> None:
    """Change a file, or the target of a link, with the stamp that the patch was made for; the change is durable then.

    ``settle`` is called when the change is durable but can still be rolled back; an interruption after that comes too
    late.
    """
    journal_file = journal_path(path)
    try:
        with _locked(path, os.O_RDWR) as fd:
            found = os.fstat(fd)
            if stamp_of(found) != before:
                raise SourceChanged(path)
            journal = _journal_for(fd, home_of(path)[1], found.st_size, patch)
            try:
                _create(journal_file, journal.encode(), stat.S_IMODE(found.st_mode) & 0o666)
            except FileExistsError as error:
                raise JournalInTheWay(path, journal_file) from error
            try:
                _change(fd, patch.writes, patch.size)
                settle()
            except BaseException:
                _restore(path, fd, journal, journal_file)
                raise
            _remove(journal_file)
    except WriteFailed:
        raise
    except OSError as error:
        raise ChangeFailed(path, reason_of(error)) from error


class Interrupted(NamedTuple):
    """What an interrupted change left next to a file."""

    journal: Journal | None  # its journal; None if it is torn, and nothing has changed yet
    is_of_file: bool  # whether the file is at some point of the change; False if it was rewritten since
    stamp: Stamp  # stamp of the file

    @property
    def change(self) -> Journal | None:
        """The change to roll back; None if the journal is only to be removed."""
        return self.journal if self.is_of_file else None

    @property
    def message(self) -> str:
        """What a rollback does."""
        if self.journal is None:
            return _NOT_BEGUN
        return _UNDONE if self.is_of_file else _OUTDATED


def read_journal(path: str) -> Interrupted | None:
    """Read the journal next to a file; None without a journal, or for that of another file."""
    journal_file = journal_path(path)
    try:
        with _locked(path, os.O_RDONLY) as fd:
            found = os.fstat(fd)
            journal = decode(_read(journal_file, {own_user(), found.st_uid, 0}))
            if journal is not None and journal.name != home_of(path)[1]:
                return None  # two names with the same checksum, or the file was renamed
            return Interrupted(journal, journal is None or _fits(fd, journal), stamp_of(found))
    except FileNotFoundError:
        return None  # the change was finished meanwhile, or the file is gone
    except (OSError, ValueError) as error:
        raise RollbackFailed(path, journal_file, reason_of(error)) from error


def roll_back(path: str, found: Interrupted, settle: Callable[[], None] = do_nothing) -> None:
    """Roll back the change that :func:`read_journal` has found, and remove its journal.

    ``settle`` is called when the file is restored; an interruption after that comes too late.
    """
    journal_file = journal_path(path)
    try:
        with _locked(path, os.O_RDWR) as fd:
            if stamp_of(os.fstat(fd)) != found.stamp:
                raise SourceChanged(path)
            if found.change is not None:
                _change(fd, found.change.old, found.change.old_size)
            settle()
            _remove(journal_file)
    except OSError as error:
        raise RollbackFailed(path, journal_file, reason_of(error)) from error


@contextmanager
def _locked(path: str, flags: int) -> Iterator[int]:
    """Open a file, with its lock against other ckptmove processes."""
    from filelock import lock_descriptor

    fd = open_file(path, flags)
    try:
        if not lock_descriptor(fd, blocking=False):
            raise BeingConverted(path)
        yield fd
    finally:
        os.close(fd)


def _journal_for(fd: int, name: str, size: int, patch: Patch) -> Journal:
    runs = [
        ChangedRange(start, _read_span(fd, Span(start, min(start + len(data), size))), bytes(data))
        for start, data in patch.writes
    ]
    if patch.size < size:
        runs.append(ChangedRange(patch.size, _read_span(fd, Span(patch.size, size)), b""))
    begin = min((run.start for run in runs), default=size)
    end = min(size, max((run.start + len(run.old) for run in runs), default=size))
    behind = Span(max(end, size - ANCHOR_BYTES), size) if end < size else Span(0, 0)
    anchors = Span(max(0, begin - ANCHOR_BYTES), begin), behind
    return Journal(
        name=name,
        old_size=size,
        new_size=patch.size,
        runs=tuple(runs),
        anchors=anchors,
        anchor_crc=_crc_of(fd, anchors),
    )


def _fits(fd: int, journal: Journal) -> bool:
    """Whether the journal was written for this file, at any point of its change."""
    size = os.fstat(fd).st_size
    is_between = min(journal.old_size, journal.new_size) <= size <= max(journal.old_size, journal.new_size)
    return (
        is_between
        and _crc_of(fd, journal.anchors) == journal.anchor_crc
        and all(_is_half_changed(_read_span(fd, _span_of(run)), run) for run in journal.runs)
    )


def _is_half_changed(found: bytes, run: ChangedRange) -> bool:
    """Whether each byte is the old one, the new one, or one of the zeros that a crash leaves."""
    nbytes = _span_of(run).nbytes
    old, new = run.old.ljust(nbytes, b"\0"), run.new.ljust(nbytes, b"\0")
    known = _LOST.sub(lambda zeros: old[zeros.start() : zeros.end()], found)
    return all(byte in {before, after} for byte, before, after in zip(known, old, new, strict=False))


def _span_of(run: ChangedRange) -> Span:
    return Span(run.start, run.start + max(len(run.old), len(run.new)))


def _crc_of(fd: int, spans: Sequence[Span]) -> int:
    return zlib.crc32(b"".join(_read_span(fd, span) for span in spans))


def _change(fd: int, writes: Sequence[tuple[int, bytes]], size: int) -> None:
    """Write bytes and cut off the rest, which happens only after the written bytes are durable."""
    for begin, data in writes:
        os.lseek(fd, begin, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    os.fsync(fd)
    if os.fstat(fd).st_size > size:
        os.ftruncate(fd, size)
        os.fsync(fd)


def _restore(path: str, fd: int, journal: Journal, journal_file: str) -> None:
    try:
        _change(fd, journal.old, journal.old_size)
        _remove(journal_file)
    except OSError as error:
        raise RollbackFailed(path, journal_file, reason_of(error)) from error


def _create(path: str, data: bytes, mode: int) -> None:
    """Create a complete and durable file, or none."""
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(os.path.dirname(path))
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise


def _remove(path: str) -> None:
    os.unlink(path)
    sync_folder(os.path.dirname(path))


def _read(path: str, owners: set[int]) -> bytes:
    """Read a journal. In a folder that others can write to, it may have been planted by another user."""
    fd = open_file(path, os.O_RDONLY | UNTRUSTED)
    try:
        found = os.fstat(fd)
        if found.st_uid not in owners:
            raise PermissionError(errno.EPERM, "it belongs to another user")
        return _read_span(fd, Span(0, found.st_size))
    finally:
        os.close(fd)


def _read_span(fd: int, span: Span) -> bytes:
    pieces: list[bytes] = []
    start = os.lseek(fd, span.start, os.SEEK_SET)
    while start < span.end:
        piece = os.read(fd, span.end - start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
