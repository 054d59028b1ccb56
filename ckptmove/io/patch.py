"""A change of a file that is made whole or not at all, and the taking back of one that was interrupted.

Never changes a byte before the journal that can put it back is durable, and never knows what the bytes mean.

Whoever changes a file, or takes a change back, holds its lock, which the system releases when the process ends: a
journal beside a file that nobody has locked is one of a process that is gone.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zlib
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from ckptmove.errors import BeingConverted, ChangeFailed, JournalInTheWay, RollbackFailed, SourceChanged, reason_of
from ckptmove.io.journal import ANCHOR_BYTES, Journal, Run, decode, home_of, journal_path
from ckptmove.io.outputs import unheard
from ckptmove.io.portable import UNTRUSTED, open_file, own_user, sync_folder
from ckptmove.io.source import stamp_of
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.io.changes import Patch
    from ckptmove.io.source import Stamp

#: Of zeros in a row a crash may be the cause; fewer of them are a number that somebody has saved.
_LOST: Final = re.compile(rb"\0{32,}")

_UNDONE: Final = "a conversion in place was interrupted; the file is again what it was before it"
_NOT_BEGUN: Final = "a conversion in place was interrupted before it changed anything; its journal was removed"
_OUTDATED: Final = (
    "the journal of an interrupted conversion in place was removed unused: the file has been written anew since"
)


def apply_patch(path: str, patch: Patch, before: Stamp, settle: Callable[[], None] = unheard) -> None:
    """Change a file: once this returns, the change is durable.

    Args:
        path: the file; of a symbolic link, what it leads to is changed.
        patch: the change.
        before: the stamp of the file that the patch was made for.
        settle: called once the change is durable and before it cannot be taken back any more: from then on an
            interruption comes too late.

    Raises:
        BeingConverted: another process is changing it.
        SourceChanged: it is not the file any more that the patch was made for.
        ChangeFailed: the system failed; the file is what it was. Where only the journal could not be removed, it is
            taken back at the next run.
        JournalInTheWay: a journal of another file has the name that this one's would have.
        RollbackFailed: the system failed, and then failed to put back what was there.
    """
    journal_file = journal_path(path)
    try:
        with _locked(path) as fd:
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
                _take_back(path, fd, journal, journal_file)
                raise
            _remove(journal_file)
    except OSError as error:
        raise ChangeFailed(path, reason_of(error)) from error


def roll_back(path: str) -> str:
    """Take back the change that the journal beside a file tells of; where there is none, there is nothing to do.

    Returns:
        What was done, as a sentence; empty where there was nothing to do.

    Raises:
        BeingConverted: the process that makes the change is still at it.
        RollbackFailed: the system refuses, or the journal is none of ours.
    """
    journal_file = journal_path(path)
    try:
        with _locked(path) as fd:
            journal = decode(_read(journal_file, {own_user(), os.fstat(fd).st_uid, 0}))
            if journal is None:
                said = _NOT_BEGUN
            elif journal.name != home_of(path)[1]:
                return ""  # two names of one checksum, or the file got another name
            elif _fits(fd, journal):
                _change(fd, journal.old, journal.old_size)
                said = _UNDONE
            else:
                said = _OUTDATED
            _remove(journal_file)
    except FileNotFoundError:
        return ""  # whoever made the change has finished it meanwhile, or the file is gone
    except (OSError, ValueError) as error:
        raise RollbackFailed(path, journal_file, reason_of(error)) from error
    return said


@contextmanager
def _locked(path: str) -> Iterator[int]:
    """A file, open for reading and writing, that no other process of ours changes."""
    from filelock import lock_descriptor  # noqa: PLC0415  # only what changes a file waits for it to be imported

    fd = open_file(path, os.O_RDWR)
    try:
        if not lock_descriptor(fd, blocking=False):
            raise BeingConverted(path)
        yield fd
    finally:
        os.close(fd)


def _journal_for(fd: int, name: str, size: int, patch: Patch) -> Journal:
    runs = [
        Run(start, _read_span(fd, Span(start, min(start + len(data), size))), bytes(data))
        for start, data in patch.writes
    ]
    if patch.size < size:
        runs.append(Run(patch.size, _read_span(fd, Span(patch.size, size)), b""))
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
    """Whether a file is the one that a journal was written for, wherever its change stopped."""
    size = os.fstat(fd).st_size
    is_between = min(journal.old_size, journal.new_size) <= size <= max(journal.old_size, journal.new_size)
    return (
        is_between
        and _crc_of(fd, journal.anchors) == journal.anchor_crc
        and all(_is_half_changed(_read_span(fd, _span_of(run)), run) for run in journal.runs)
    )


def _is_half_changed(found: bytes, run: Run) -> bool:
    """Whether each byte is the old or the new one, or was lost in a crash, which leaves zeros."""
    nbytes = _span_of(run).nbytes
    old, new = run.old.ljust(nbytes, b"\0"), run.new.ljust(nbytes, b"\0")
    known = _LOST.sub(lambda zeros: old[zeros.start() : zeros.end()], found)
    return all(byte in {before, after} for byte, before, after in zip(known, old, new, strict=False))


def _span_of(run: Run) -> Span:
    return Span(run.start, run.start + max(len(run.old), len(run.new)))


def _crc_of(fd: int, spans: Sequence[Span]) -> int:
    return zlib.crc32(b"".join(_read_span(fd, span) for span in spans))


def _change(fd: int, writes: Sequence[tuple[int, bytes]], size: int) -> None:
    """Write, and cut off what is behind; nothing is cut off before what was written is durable."""
    for begin, data in writes:
        os.lseek(fd, begin, os.SEEK_SET)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    os.fsync(fd)
    if os.fstat(fd).st_size > size:
        os.ftruncate(fd, size)
        os.fsync(fd)


def _take_back(path: str, fd: int, journal: Journal, journal_file: str) -> None:
    try:
        _change(fd, journal.old, journal.old_size)
        _remove(journal_file)
    except OSError as error:
        raise RollbackFailed(path, journal_file, reason_of(error)) from error


def _create(path: str, data: bytes, mode: int) -> None:
    """A new file, whole and durable when this returns, and gone when it does not."""
    fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(os.path.dirname(path))  # noqa: PTH120  # the path stays text
    except BaseException:
        with suppress(OSError):
            os.unlink(path)  # noqa: PTH108  # the path stays text
        raise


def _remove(path: str) -> None:
    os.unlink(path)  # noqa: PTH108  # the path stays text
    sync_folder(os.path.dirname(path))  # noqa: PTH120  # the path stays text


def _read(path: str, owners: set[int]) -> bytes:
    """All of a journal; in a folder that others may write to, they could have put one of theirs there."""
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
