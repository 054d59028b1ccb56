"""Read the local headers of a zip archive, compare them with its directory, and find bytes that belong to no record.

One reader skips such bytes, another may read them. They are not read here, and a header is read only if the gap after
its record is larger than padding. Formats as in PKWARE's APPNOTE 4.3.7 and 4.5.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive
from ckptmove.formats.zip_archive.index import FLAG_DESCRIPTOR, FLAG_ENCRYPTED, U32_MAX, split_extra
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.formats.zip_archive.index import ZipDirectory, ZipRecord, ZipRecords
    from ckptmove.io.contracts import ByteSource

LOCAL: Final = struct.Struct("<4s5H3L2H")
LOCAL_SIGNATURE: Final = b"PK\x03\x04"
#: Minimum number of bytes before a record's data.
LOCAL_BYTES: Final = LOCAL.size
#: Length of one read of headers, and the distance between headers from which each is read alone.
_WINDOW: Final = 1 << 16
_FAR: Final = 1 << 12
#: A local header: signature, version to date, CRC and lengths, length of the name, length of the extra field.
_LOCAL_GROUPS: Final = struct.Struct("<4s10s12s2sH")
#: The same fields of a central entry, from its version to the length of the name.
_CENTRAL_GROUPS: Final = struct.Struct("<6x10s12s2s")
_CENTRAL_BYTES: Final = 46
#: CRC and lengths in a local header whose record has a data descriptor.
_DEFERRED: Final = bytes(12)

#: Maximum length of a data descriptor.
_DESCRIPTOR_BYTES: Final = 24
#: Maximum length between two records of torch without the padding: tags of extra fields, zip64 sizes, a descriptor.
_BETWEEN: Final = 128


class LocalHeader(NamedTuple):
    """The header before a record's data."""

    fixed: bytes  # its first 30 bytes
    name: bytes  # name of the record, as bytes
    data_start: int  # offset of the data in the file


class LocalHeaders:
    """Local headers of an archive, read many at a time."""

    def __init__(self, source: ByteSource, directory: ZipDirectory) -> None:
        self.source = source
        self.directory = directory
        #: Offset of each record's data, by place; 0 until :meth:`check_all` has compared its header.
        self._data_starts = array("Q")
        self._window = b""
        self._window_start = 0

    def data_start(self, place: int) -> int:
        """Offset of a record's data in the file, by its place in the directory."""
        known = self._data_starts[place] if self._data_starts else 0
        return known or self.read(self.directory.records[place]).data_start

    def read(self, record: ZipRecord) -> LocalHeader:
        name = self.directory.records.raw_name(record.place)
        start = record.header_offset
        head = self._bytes(start, start + LOCAL.size + len(name))
        data_start = start + len(head) + self._check(record, name, head)
        if data_start + record.stored_bytes > self.directory.start:
            raise DamagedArchive(self.source.path, f"record '{record.name}' overlaps the directory")
        return LocalHeader(head[: LOCAL.size], name, data_start)

    def check_all(self) -> None:
        """Compare the local headers of all records with the directory, and keep the offsets of their data."""
        records, last = self.directory.records, self.directory.start
        self._data_starts = array("Q", bytes(8 * len(records)))
        group: list[tuple[int, int]] = []
        begin = done = 0
        for place in records.in_file_order():
            start = records.header_offsets[place]
            end = start + LOCAL.size + records.name_bytes[place]
            if end > last:
                continue  # past the end: the record has no header
            if start - done > _FAR or end - begin > _WINDOW:
                self._check_group(group, begin, done)
                group, begin = [], start
            group.append((place, end))
            done = max(done, end)
        self._check_group(group, begin, done)

    def _check_group(self, group: list[tuple[int, int]], begin: int, done: int) -> None:
        """Check neighbouring local headers with one read; miniz and zipfile repeat the directory's bytes in them."""
        data, records, last = self.source.read(begin, done), self.directory.records, self.directory.start
        local, central, data_starts = _LOCAL_GROUPS.unpack_from, _CENTRAL_GROUPS.unpack_from, self._data_starts
        for place, end in group:
            entry, at = records.raw_starts[place], records.header_offsets[place] - begin
            signature, fixed, sums, name_bytes, extra_bytes = local(data, at)
            other_fixed, other_sums, other_name_bytes = central(records.raw, entry)
            agree = (
                signature == LOCAL_SIGNATURE
                and fixed == other_fixed
                and name_bytes == other_name_bytes
                and sums == (_DEFERRED if records.flags[place] & FLAG_DESCRIPTOR else other_sums)
                and records.raw.startswith(data[at + LOCAL.size : end - begin], entry + _CENTRAL_BYTES)
            )
            if not agree:
                self._check(records[place], records.raw_name(place), data[at : end - begin])
            data_start = end + extra_bytes
            if data_start + records.stored_bytes[place] <= last:
                data_starts[place] = data_start

    def extra_fields(self, record: ZipRecord, header: LocalHeader) -> tuple[tuple[int, bytes], ...]:
        start = record.header_offset + LOCAL.size + len(header.name)
        return split_extra(self._bytes(start, header.data_start), self.source.path, record.name)

    def _check(self, record: ZipRecord, name: bytes, head: bytes) -> int:
        """Compare a local header with the directory, and return the length of its extra field."""
        fields = LOCAL.unpack_from(head)
        if fields[0] != LOCAL_SIGNATURE or fields[9] != len(name) or head[LOCAL.size :] != name:
            raise DamagedArchive(
                self.source.path, f"the header before record '{record.name}' belongs to another record"
            )
        if _contradicts(fields, record):
            raise DamagedArchive(
                self.source.path, f"the header before record '{record.name}' contradicts the directory"
            )
        length: int = fields[10]
        return length

    def _bytes(self, start: int, end: int) -> bytes:
        if start < self._window_start or end > self._window_start + len(self._window):
            size = self.source.size
            if end > size:
                raise DamagedArchive(self.source.path, f"the header of a record at byte {start} reaches past the end")
            self._window = self.source.read(start, max(end, min(start + _WINDOW, size)))
            self._window_start = start
        return self._window[start - self._window_start : end - self._window_start]


def _contradicts(fields: tuple[int, ...], record: ZipRecord) -> bool:
    """Whether a local header contradicts the directory, which torch reads. A field that is 0 matches anything."""
    _, _, flags, method, _, _, crc, stored, nbytes, _, _ = fields
    if method != record.method or (flags ^ record.flags) & FLAG_ENCRYPTED:
        return True
    if record.crc and crc not in {0, record.crc}:
        return True
    return stored not in {0, U32_MAX, record.stored_bytes} or nbytes not in {0, U32_MAX, record.nbytes}


def hidden_bytes(
    directory: ZipDirectory, headers: LocalHeaders, alignment: int, size: int
) -> Iterator[tuple[str, Span]]:
    """Name and span of each run of bytes that belongs to no record of an archive of this size."""
    room, records = alignment + _BETWEEN, directory.records
    names, offsets, sizes = records.name_bytes, records.header_offsets, records.stored_bytes
    claimed, before = 0, None
    for place in records.in_file_order():
        start = offsets[place]
        if start < claimed:
            raise DamagedArchive(headers.source.path, f"record '{records.name(place)}' overlaps another record")
        if start > claimed + room or before is None:
            yield from _gap(records, before, headers, min(start, directory.start))
        claimed, before = start + LOCAL_BYTES + names[place] + sizes[place], place
    if claimed + room < directory.start:
        yield from _gap(records, before, headers, directory.start)
    if directory.bytes_after_end:
        yield "bytes after the directory", Span(size - directory.bytes_after_end, size)


def _gap(records: ZipRecords, before: int | None, headers: LocalHeaders, start: int) -> Iterator[tuple[str, Span]]:
    """The gap between the end of a record, or the start of the file, and an offset."""
    end = headers.data_start(before) + records.stored_bytes[before] if before is not None else 0
    nbytes = start - end
    if before is not None and nbytes <= _DESCRIPTOR_BYTES:
        return
    if nbytes:
        what = f"bytes after {records.name(before)}" if before is not None else "bytes before the records"
        yield what, Span(end, start)
