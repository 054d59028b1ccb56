"""Read the members of a zip, and lay out a zip with some of them changed.

Compressed members are inflated within a limit, and members that share bytes are refused.
"""

from __future__ import annotations

import zlib
from collections import deque
from contextlib import suppress
from functools import cached_property
from posixpath import dirname, join, normpath
from typing import TYPE_CHECKING, Final

from ckptmove.errors import CrcMismatch, DamagedArchive, LimitExceeded, MustBeUnpacked, NotACheckpoint
from ckptmove.formats.opening import recognise
from ckptmove.formats.signatures import EMPTY_ZIP, NUMPY_ARRAY
from ckptmove.formats.zip_archive.headers import LocalHeaders
from ckptmove.formats.zip_archive.index import DEFLATED, read_directory
from ckptmove.formats.zip_archive.layout import Layout, NewRecord
from ckptmove.io.inflate import inflate
from ckptmove.io.part import MemorySource
from ckptmove.io.segments import blocks_of, length, without_checks
from ckptmove.model import ArchiveFact, Span
from ckptmove.opening.members import Members, full_path, shown_path, unsafe_member

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ckptmove.formats.zip_archive.index import ZipRecord, ZipRecords
    from ckptmove.io.contracts import ByteSource, Segment
    from ckptmove.limits import Limits

_BLOCK: Final = 1 << 20
#: Limit for the total inflated size of all compressed checkpoints of an archive, before and after a conversion. A
#: conversion holds all of them in memory.
MOST_INFLATED_BYTES: Final = 1 << 26
#: Type in the mode of a member, as Unix has it (``sys/stat.h``); and the harmless ones: none, file, folder, symlink.
_TYPE: Final = 0o170000
_SYMLINK: Final = 0o120000
_PLAIN: Final = frozenset({0, 0o100000, 0o040000, _SYMLINK})
#: Bytes of a compressed member that show whether it may be a checkpoint.
_HEAD: Final = 4096


class ZipMembers(Members):
    """A zip of files."""

    form = "zip"
    has_checksums = True

    def __init__(self, source: ByteSource, limits: Limits) -> None:
        self.source = source
        self._directory = read_directory(source, limits)
        records = self._directory.records
        if self._directory.shift:
            raise DamagedArchive(source.path, f"{self._directory.shift} bytes precede its first record")
        if len(records) > limits.entries:
            raise LimitExceeded("members of an archive", limit=limits.entries, actual=len(records), path=source.path)
        files = [record for record in records if not record.name.endswith("/")]
        full = next((record.name for record in records if record.name.endswith("/") and record.nbytes), "")
        if full:  # a reader that opens records by name reads it
            raise DamagedArchive(source.path, f"folder '{shown_path(full):.80}' has bytes, as only a file has")
        for record in files:
            if record.obstacle:
                is_encrypted = record.obstacle == "encrypted"
                raise self.refusal(f"member '{shown_path(record.name):.80}' is {record.obstacle}", locked=is_encrypted)
        super().__init__(source.path, self.listed([(record.name, record.nbytes) for record in files]), (), ())
        self._records = {shown_path(record.name): record for record in files}
        self._spans = dict(_spans(source, LocalHeaders(source, self._directory), records))
        self._inflated: set[str] = set()
        self._left = MOST_INFLATED_BYTES
        self._facts = tuple(fact for record in records for fact in self._unsafe(record))

    def look(self, path: str) -> None:
        """Check the first bytes of a compressed member, to inflate only possible checkpoints completely."""
        record = self._records[path]
        if record.method == DEFLATED:
            head = self.head(path, _HEAD)
            full = full_path(self.source.path, path)
            if record.nbytes and not head:
                raise NotACheckpoint(full, "bytes that cannot be inflated")
            is_cut = len(head) < record.nbytes
            try:
                with suppress(DamagedArchive):  # the first bytes of a zip look like a damaged zip
                    recognise(MemorySource(full, head), is_cut=is_cut)
            except NotACheckpoint as error:
                if error.found == EMPTY_ZIP:
                    return  # zipfile looks for records from the end
                if not (is_cut and error.found == NUMPY_ARRAY and error.holds_pickle):
                    raise
                try:
                    recognise(self.open(path))  # the pickle of an array of objects is read whole
                except (MustBeUnpacked, CrcMismatch) as refusal:
                    refusal.warn(error.runs)
                    raise

    def head(self, path: str, nbytes: int) -> bytes:
        """The first bytes of a member, inflated if it is compressed; fewer if it is damaged or smaller."""
        record = self._records[path]
        start, end = self._spans[record.place]
        if record.method != DEFLATED:
            return self.source.read(start, min(start + nbytes, end))
        found = b""
        for block in inflate(self.source.blocks(Span(start, end), _HEAD), nbytes, nbytes):
            found += block
            if len(found) == nbytes:
                break  # the rest of the member is not read
        return found

    def open(self, path: str) -> ByteSource:
        """The bytes of a member; a compressed one is inflated if all inflated members fit in memory together."""
        record, span = self._records[path], self.span(path)
        if span is not None:
            return self.part(path, span)
        if path not in self._inflated:
            if record.nbytes > self._left:
                detail = (
                    f"member '{path:.80}' is compressed, and too large to inflate in memory ({record.nbytes:,} bytes)"
                )
                raise self.refusal(detail)
            self._left -= record.nbytes
            self._inflated.add(path)
        data = b"".join(self._contents(record))
        if len(data) != record.nbytes or zlib.crc32(data) != record.crc:
            raise CrcMismatch(self.source.path, path)
        return MemorySource(full_path(self.source.path, path), data)

    def span(self, path: str) -> Span | None:
        """Span of a member; None if it is compressed."""
        record = self._records[path]
        return None if record.method == DEFLATED else self._spans[record.place]

    def limits(self, path: str, limits: Limits) -> Limits:
        """Resource limits for a member; the limits of a compressed one grow with its compressed size.

        A few kilobytes can inflate to millions of pickle operations, which take a minute to read.
        """
        record = self._records[path]
        if record.method != DEFLATED:
            return limits
        return limits.for_packed(record.stored_bytes, self._candidates)

    @cached_property
    def _candidates(self) -> int:
        """Number of compressed members that may be checkpoints, by their first bytes."""
        return sum(record.method == DEFLATED and self._may_be_one(path) for path, record in self._records.items())

    def _may_be_one(self, path: str) -> bool:
        try:
            self.look(path)
        except NotACheckpoint:
            return False
        return True

    def contents(self, path: str) -> Iterator[bytes | memoryview]:
        """The bytes of a member block by block, inflated if they are compressed; each is valid until the next."""
        record, crc, nbytes = self._records[path], 0, 0
        for block in self._contents(record):
            crc, nbytes = zlib.crc32(block, crc), nbytes + len(block)
            yield block
        if (crc, nbytes) != (record.crc, record.nbytes):
            raise CrcMismatch(self.source.path, path)

    def flaws(self, path: str) -> tuple[ArchiveFact, ...]:
        return () if self._sound(path) else (ArchiveFact("crc-mismatch", path, self._records[path].nbytes, path),)

    def lay_out(self, changed: Mapping[str, Sequence[Segment]], removed: Collection[str]) -> tuple[Segment, ...]:
        """Segments of the zip with some members changed or left out, and everything else unchanged.

        Changed members are stored without compression. They are read once here, because the CRC of a member precedes
        its bytes.
        """
        new: dict[int, NewRecord] = {}
        for path, segments in changed.items():
            crc = 0
            for block in blocks_of(self.source, without_checks(segments)):
                crc = zlib.crc32(block, crc)
            new[self._records[path].place] = NewRecord(tuple(segments), sum(map(length, segments)), crc)
        names = enumerate(self._directory.records.names())
        gone = frozenset(place for place, name in names if shown_path(name).rstrip("/") in removed)
        done = gone.union(new)
        for path, record in self._records.items():
            if record.method == DEFLATED and record.place not in done and not self._sound(path):
                raise CrcMismatch(self.source.path, path)  # its bytes are copied without inflating them
        return Layout(LocalHeaders(self.source, self._directory), alignment=1).build(new, gone)

    def _unsafe(self, record: ZipRecord) -> tuple[ArchiveFact, ...]:
        mode = self._directory.records.mode(record.place)
        target, kind = "", mode & _TYPE
        if kind == _SYMLINK and record.nbytes <= _HEAD:
            text = b"".join(self._contents(record)).decode("utf-8", "backslashreplace")
            target = normpath(join(dirname(record.name), text))
        is_special = kind not in _PLAIN
        mode = 0 if record.name.endswith("/") else mode
        return unsafe_member(record.name, record.nbytes, mode, target, is_special=is_special)

    def _contents(self, record: ZipRecord) -> Iterator[bytes | memoryview]:
        blocks = self.source.blocks(self._spans[record.place], _BLOCK)
        return inflate(blocks, record.nbytes + 1, _BLOCK) if record.method == DEFLATED else blocks

    def _sound(self, path: str) -> bool:
        try:
            deque(self.contents(path), maxlen=0)
        except CrcMismatch:
            return False
        return True


def _spans(source: ByteSource, headers: LocalHeaders, records: ZipRecords) -> Iterator[tuple[int, Span]]:
    """Span of each record, by its index in the directory."""
    taken = 0
    for record in records.by_offset():
        start = headers.data_start(record.place)
        if record.header_offset < taken:
            raise DamagedArchive(source.path, f"record '{record.name}' overlaps another one")
        taken = start + record.stored_bytes
        yield record.place, Span(start, taken)
