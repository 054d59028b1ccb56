"""Undo a conversion in place: the one command that follows a journal, or the record in a file.

Both come with the file, and both may be forged. An undo is consent to go back over a conversion, and nothing else, so
it first judges the file that it would write:

- The bytes that change are bytes that a conversion in place writes: the tail of an archive, or the pickle of another
  file. All others stay, those of the tensors among them.
- The file before and after is in one format, with the same storages at the same offsets, and the same other records.
- The two pickles have the same tree, apart from devices and the flags that follow them, and neither imports a name
  that the other does not.
- The result has no dangerous name and no second reading that the file has not.

A crash can leave a file that is not readable. Of an archive, the state from before the first conversion is still there,
because conversions only append: it takes the place of the file, and a journal that would change it is refused. Of
another file, the state that the conversion intended takes its place, which the journal has too. The two states of the
journal may then differ only in the bytes of devices. So the bytes that the crash has left, which must be in one of the
two, are those of the restored file; only where it has left zeros does the journal say alone what was there.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.parts import read_file
from ckptmove.comparison.conversion_pair import Side, difference
from ckptmove.conversion.in_place import notes_on_names
from ckptmove.conversion.results import UndoResult
from ckptmove.errors import (
    ArchiveOfFiles,
    DamagedArchive,
    InPlaceImpossible,
    LimitExceeded,
    NothingToUndo,
    UnreadableInput,
)
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.formats.contract import ReadOnlyFormat
from ckptmove.formats.opening import container_of
from ckptmove.io.changes import RestoresMore
from ckptmove.io.locations import is_folder, journal_path
from ckptmove.io.part import ChangedSource, PartSource
from ckptmove.io.patch import apply_patch, read_journal, roll_back
from ckptmove.io.segments import blocks_of, without_checks
from ckptmove.io.source import open_source
from ckptmove.model import Severity, Span
from ckptmove.pickles.scan import operation_end
from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ckptmove.formats.contract import Container
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.io.journal import Journal
    from ckptmove.io.patch import Interrupted
    from ckptmove.io.source import FileSource
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory, StorageRef
    from ckptmove.pickles.state import Machine

#: Findings about a file that is unsafe to load.
_UNSAFE: Final = ("S702", "F805")
#: Operations that drop values from the stack: calls among them are in no tree.
_DROPPING: Final = frozenset({"POP", "POP_MARK"})
_THEN_UNSAFE: Final = "the file would then have the finding "


def undo_in_place(path: str, *, dry_run: bool, force: bool, limits: Limits, settle: Callable[[], None]) -> UndoResult:
    """Roll back an interrupted conversion in place, or undo all that are finished; as :func:`ckptmove.undo`."""
    began = time.perf_counter()
    if is_folder(path):
        raise NothingToUndo(path, "it is a directory, and only files can be converted in place", "directory")
    with naming(path):
        interrupted = read_journal(path)
        with closing(open_source(path)) as source:
            if interrupted is None:
                size = _undo_finished(source, dry_run=dry_run, force=force, limits=limits, settle=settle)
            else:
                size = _roll_back(source, interrupted, dry_run=dry_run, force=force, limits=limits, settle=settle)
            removed = max(0, source.size - size)
    notes = (*notes_on_names(path), *(() if interrupted is None else (interrupted.message,)))
    return UndoResult(
        path=path, size=size, removed=removed, is_done=not dry_run, seconds=time.perf_counter() - began, notes=notes
    )


def _undo_finished(
    source: FileSource, *, dry_run: bool, force: bool, limits: Limits, settle: Callable[[], None]
) -> int:
    """Cut off what conversions in place have added; return the size of the file before them."""
    try:
        container = container_of(source, limits)
    except ArchiveOfFiles as error:
        reason = "it is an archive of files, which cannot be converted in place"
        raise NothingToUndo(source.path, reason, "archive") from error
    try:
        patch = container.undo()
    except NothingToUndo as error:
        error.container = container.name
        raise
    if not force:
        reason = _judge(source, PartSource(source, Span(0, patch.size)), limits)
        if reason:
            raise RestoresMore(source.path, reason, is_unsafe=reason.startswith(_THEN_UNSAFE))
    if not dry_run:
        apply_patch(source.path, patch, source.place.stamp, settle)
    return patch.size


def _roll_back(
    source: FileSource,
    interrupted: Interrupted,
    *,
    dry_run: bool,
    force: bool,
    limits: Limits,
    settle: Callable[[], None],
) -> int:
    """Restore the bytes of a journal, or remove it if nothing is to be restored; return the size of the file then."""
    journal = interrupted.change
    if journal is not None and not force:
        restored = ChangedSource(source, journal.old, journal.old_size)
        intended = ChangedSource(source, journal.new, journal.new_size)
        reason = _judge(source, restored, limits, [*_changed(source, journal)], intended)
        if reason:
            journal_file, is_unsafe = journal_path(source.path), reason.startswith(_THEN_UNSAFE)
            raise RestoresMore(source.path, reason, journal_file, is_unsafe=is_unsafe)
    if not dry_run:
        roll_back(source.path, interrupted, settle)
    return source.size if journal is None else journal.old_size


def _changed(source: ByteSource, journal: Journal) -> Iterator[Span]:
    """The ranges of a file whose bytes a rollback changes or adds."""
    for start, old in journal.old:
        end = start + len(old)
        here = source.read(start, min(end, source.size)) if start < source.size else b""
        if here != old:
            yield Span(start, end)


class _Read(NamedTuple):
    """A file that was read, present or restored."""

    container: Container
    inventory: Inventory
    pickle: bytes  # its object pickles
    side: Side  # its tree, to compare
    is_whole: (
        bool  # whether the tree has all that the pickle makes: nothing is dropped, left on the stack or after STOP
    )


def _judge(
    present: ByteSource,
    restored: ByteSource,
    limits: Limits,
    changed: Sequence[Span] = (),
    intended: ByteSource | None = None,
) -> str:
    """What keeps a restored file from being the source of a conversion, as a clause; empty if nothing does.

    Args:
        changed: ranges whose bytes the undo changes.
        intended: the file after the conversion, if that was interrupted.
    """
    try:
        then = _read(restored, limits)
    except (UnreadableInput, LimitExceeded) as error:
        return f"the file could then not be read, because {error.message}"
    try:
        now = _read(present, limits)
        known = _unsafe(now.inventory)
    except (UnreadableInput, LimitExceeded):
        found, known = _in_its_place(then, restored, limits, changed, intended or present), set[str]()
        if found is None:
            return "the file cannot be read as it is, so nothing shows what it was"
        now = found
    return _difference(now, then, changed, known)


def _in_its_place(
    then: _Read, restored: ByteSource, limits: Limits, changed: Sequence[Span], intended: ByteSource
) -> _Read | None:
    """What to compare the restored file with if the present one is not readable; None if there is nothing."""
    try:
        size = then.container.undo().size
    except NothingToUndo:
        size = restored.size
    if not any(span.start < size for span in changed):
        return _read(PartSource(restored, Span(0, size)), limits)
    with suppress(UnreadableInput, LimitExceeded):
        found = _read(intended, limits)
        if _only_devices_differ(then, found):
            return found
    return None


def _read(source: ByteSource, limits: Limits) -> _Read:
    content = read_file(source, limits)
    machine = cast("Machine", content.machine)  # the tree is read to be edited
    side = Side.of(machine.root, content.inventory)
    keeps_all = _DROPPING.isdisjoint(content.inventory.foreign_opcodes)
    is_whole = keeps_all and not machine.stack and machine.end == machine.data_bytes
    return _Read(content.container, content.inventory, machine.data, side, is_whole)


def _only_devices_differ(one: _Read, other: _Read) -> bool:
    """Whether two pickles of one length differ only in operations that push a device."""
    if len(one.pickle) != len(other.pickle):
        return False
    data = bytearray(other.pickle)
    for site in one.side.devices:
        end = operation_end(one.pickle, site)
        data[site:end] = one.pickle[site:end]
    return data == one.pickle


def _difference(  # noqa: PLR0911  # a reason for each check
    now: _Read, then: _Read, changed: Sequence[Span], known: set[str]
) -> str:
    """What differs in more than a conversion changes, as a clause; empty if nothing does.

    ``now`` is the present file, or its archive from before the first conversion; ``known`` has the codes of its unsafe
    findings.
    """
    if then.container.name != now.container.name or then.container.byteorder != now.container.byteorder:
        return "the format of the file differs"
    unsafe = _unsafe(then.inventory) - known
    if unsafe:
        return f"{_THEN_UNSAFE}{min(unsafe)}"
    names = {use.name for use in then.inventory.globals} - {use.name for use in now.inventory.globals}
    if names:
        return f"its pickle would import {some(sorted(names), 1)}"
    if not _are_within(changed, then, now):
        return "bytes would change that no conversion in place writes"
    if [*map(_without_device, then.inventory.storages)] != [*map(_without_device, now.inventory.storages)]:
        return "storages would change"
    for storage in then.inventory.storages:
        if not _has_same_bytes(storage.key, then.container, now.container, changed):
            return f"the bytes of storage {storage.key:.40} would change"
    if dict(then.container.extras()) != dict(now.container.extras()):
        return "records other than its pickle would change"
    if not then.is_whole and not _only_devices_differ(then, now):
        return "its pickle has operations that no value shows, so not all of it can be compared"
    path = difference(then.side, now.side)
    return f"another value would stand at {path:.80}" if path else ""


def _unsafe(inventory: Inventory) -> set[str]:
    found = find_all(inventory, Context())
    return {one.code for one in found if one.code in _UNSAFE and one.severity == Severity.ERROR}


def _are_within(changed: Sequence[Span], then: _Read, now: _Read) -> bool:
    """Whether all ranges are ones that the conversion of the restored file to the present one writes."""
    if not changed:
        return True
    try:
        patch = then.container.patch(now.pickle)
    except (InPlaceImpossible, ReadOnlyFormat, DamagedArchive):
        return False
    writes = [Span(start, start + len(data)) for start, data in patch.writes]
    writes.append(Span(patch.size, max(patch.size, then.container.source.size)))
    return all(_is_covered(span, writes) for span in changed)


def _is_covered(span: Span, writes: Sequence[Span]) -> bool:
    """Whether a range is in others, which are in order."""
    start = span.start
    for one in writes:
        if one.start <= start < one.end:
            start = one.end
    return start >= span.end


def _without_device(storage: StorageRef) -> StorageRef:
    return storage._replace(device="", tag_sites=(), class_sites=())


def _has_same_bytes(key: str, one: Container, other: Container, changed: Sequence[Span]) -> bool:
    """Whether the bytes of a storage are the same in both files; they are read only if they are not in one place."""
    found = one.storage_segment(key), other.storage_segment(key)
    if None in found:
        return found == (None, None)
    first, second = cast("tuple[Segment, Segment]", found)
    span = one.storage_span(key)
    is_apart = span is not None and not any(each.start < span.end and span.start < each.end for each in changed)
    return (first == second and is_apart) or _digest(one.source, first) == _digest(other.source, second)


def _digest(source: ByteSource, segment: Segment) -> bytes:
    digest = hashlib.sha256()
    for block in blocks_of(source, without_checks((segment,))):
        digest.update(block)
    return digest.digest()
