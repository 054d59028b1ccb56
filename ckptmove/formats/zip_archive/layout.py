"""Lay out a new zip archive as segments: copied spans of the old archive, and new bytes.

Padding as in torch's caffe2/serialize/inline_container.cc ``getPadding``: an extra field ``FB`` of at least four bytes
moves the data of a record to the first aligned offset. Only the header after a record that changed its length is
rewritten: everything after it moves by a multiple of the alignment, and is copied as one block.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive
from ckptmove.formats.zip_archive.headers import LOCAL
from ckptmove.formats.zip_archive.index import (
    FLAG_DESCRIPTOR,
    STORED,
    U16_MAX,
    U32_MAX,
    ZIP64_EXTRA,
    Replacement,
    ZipRecord,
    emit_directory,
    join_extra,
)
from ckptmove.io.contracts import BytesSegment, CheckedRange, CopySegment
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ckptmove.formats.zip_archive.headers import LocalHeader, LocalHeaders
    from ckptmove.io.contracts import Segment

_DESCRIPTOR_SIGNATURE: Final = b"PK\x07\x08"
PADDING_EXTRA: Final = int.from_bytes(b"FB", "little")
#: The two lengths in a local header.
_LENGTHS: Final = slice(18, 26)
#: Flag bits for the level of compression.
_DEFLATE_FLAGS: Final = 0x0006


class NewRecord(NamedTuple):
    """New bytes of a record, stored plainly."""

    segments: tuple[Segment, ...]  # the bytes
    nbytes: int  # their number
    crc: int  # their CRC-32, or 0 in an archive without CRCs


def emit_descriptor(crc: int, nbytes: int, *, is_wide: bool) -> bytes:
    """The data descriptor after a plainly stored record."""
    return struct.pack("<4sL2Q" if is_wide else "<4s3L", _DESCRIPTOR_SIGNATURE, crc, nbytes, nbytes)


class Layout:
    """Lays out one archive, record by record in the order of the file."""

    def __init__(self, headers: LocalHeaders, alignment: int) -> None:
        """Start at the first byte. The data of a record moves by a multiple of the alignment; 1 pads nothing."""
        self._headers = headers
        self._source = headers.source
        self._directory = headers.directory
        self._alignment = alignment
        self._segments: list[Segment] = []
        self._checks: list[CheckedRange] = []
        #: End of the part of the source that is laid out, start of the open copy, and length of the output before it.
        self._taken = 0
        self._copy_from = 0
        self._written = 0

    def build(self, new: Mapping[int, NewRecord], removed: Collection[int] = ()) -> tuple[Segment, ...]:
        """Segments of the archive with some records replaced or left out, by place in the directory."""
        records = self._directory.records
        offsets = [0] * len(records)
        replaced: dict[int, Replacement] = {}
        for record in records.by_offset():
            data_start = self._headers.data_start(record.place)
            if record.header_offset < self._taken:
                raise DamagedArchive(self._source.path, f"record '{record.name}' overlaps another record")
            if record.place in removed:
                self._flush(record.header_offset)
                self._skip(record, data_start)
                continue
            # Its offset in the output, which the open copy determines.
            offset = offsets[record.place] = self._written + record.header_offset - self._copy_from
            change = new.get(record.place)
            if change is not None:
                replaced[record.place] = self._replace(record, change, offset)
                continue
            if (offset - record.header_offset) % self._alignment:
                self._realign(record, offset)
            self._taken = data_start + record.stored_bytes
            if record.crc and record.method == STORED:
                self._checks.append(CheckedRange(Span(data_start, self._taken), record.crc, record.name))
        if not new and not removed:
            self._taken = self._source.size
            self._flush()
            return tuple(self._segments)
        self._taken = self._directory.start
        self._flush()
        self._put(emit_directory(self._directory, self._written, offsets, replaced, self._source.path, removed))
        return tuple(self._segments)

    def append(self, new: Mapping[int, NewRecord], between: bytes) -> bytes:
        """Bytes to append to the source, so that the result is an archive with some records replaced, by place.

        The bytes ``between`` come before the new directory.
        """
        self._written = self._source.size
        offsets = [*self._directory.records.header_offsets]
        replaced: dict[int, Replacement] = {}
        for place, change in new.items():
            record = self._directory.records[place]
            offsets[place] = self._written
            replaced[place] = self._emit(record, self._headers.read(record), change, self._written)
        self._put(between)
        self._put(emit_directory(self._directory, self._written, offsets, replaced, self._source.path))
        return b"".join(segment.data for segment in self._segments if isinstance(segment, BytesSegment))

    def _realign(self, record: ZipRecord, offset: int) -> None:
        """Rewrite the header of a kept record, so that its data moves by a multiple of the alignment."""
        self._flush(record.header_offset)
        header = self._headers.read(record)
        others = tuple(field for field in self._headers.extra_fields(record, header) if field[0] != PADDING_EXTRA)
        extra = self._pad(others, record, offset + LOCAL.size + len(header.name), header.data_start)
        self._put(header.fixed[:28] + struct.pack("<H", len(extra)) + header.name + extra)
        self._copy_from = self._taken = header.data_start

    def _replace(self, record: ZipRecord, change: NewRecord, offset: int) -> Replacement:
        self._flush(record.header_offset)
        header = self._headers.read(record)
        replacement = self._emit(record, header, change, offset)
        self._skip(record, header.data_start)
        return replacement

    def _skip(self, record: ZipRecord, data_start: int) -> None:
        """Continue after the data of a record and its data descriptor."""
        end = data_start + record.stored_bytes
        self._copy_from = self._taken = end + self._descriptor_bytes(record, end)

    def _emit(self, record: ZipRecord, header: LocalHeader, change: NewRecord, offset: int) -> Replacement:
        """Write header, bytes and, if the source has one, data descriptor of a new record."""
        flags = record.flags & ~_DEFLATE_FLAGS
        described = bool(flags & FLAG_DESCRIPTOR)
        # stable-baselines3 makes Python's zipfile write 64-bit lengths even for small records.
        was_wide = not described and header.fixed[_LENGTHS] == b"\xff" * 8
        # As miniz: no stored length if a descriptor follows. It also writes the offset, which no reader uses.
        is_wide = was_wide or change.nbytes >= U32_MAX
        sizes = (change.nbytes, 0 if described else change.nbytes) if is_wide else ()
        wide = (*sizes, offset) if offset >= U32_MAX else sizes
        others = [
            field
            for field in self._headers.extra_fields(record, header)
            if field[0] not in {PADDING_EXTRA, ZIP64_EXTRA}
        ]
        if wide:
            others.insert(0, (ZIP64_EXTRA, struct.pack(f"<{len(wide)}Q", *wide)))
        congruent = header.data_start if record.method == STORED else 0
        extra = self._pad(tuple(others), record, offset + LOCAL.size + len(header.name), congruent)
        narrow = U32_MAX if is_wide else change.nbytes
        sums = (0, 0, 0) if described else (change.crc, narrow, narrow)
        fixed = header.fixed[:6] + struct.pack("<2H", flags, STORED) + header.fixed[10:14] + struct.pack("<3L", *sums)
        self._put(fixed + struct.pack("<2H", len(header.name), len(extra)) + header.name + extra)
        self._segments += change.segments
        self._written += change.nbytes
        if described:
            self._put(emit_descriptor(change.crc, change.nbytes, is_wide=bool(wide)))
        return Replacement(flags, change.crc, change.nbytes)

    def _pad(self, others: tuple[tuple[int, bytes], ...], record: ZipRecord, start: int, congruent: int) -> bytes:
        """Extra fields, and padding up to the first data offset that is congruent to another offset."""
        extra = join_extra(others)
        if self._alignment == 1:
            return extra
        first = start + len(extra) + 4
        missing = (congruent - first) % self._alignment
        if len(extra) + 4 + missing > U16_MAX:
            raise DamagedArchive(self._source.path, f"record '{record.name}' has no room to be aligned")
        return extra + join_extra(((PADDING_EXTRA, b"Z" * missing),))

    def _descriptor_bytes(self, record: ZipRecord, end: int) -> int:
        """Length of the data descriptor after a record's data; 0 if none matches the directory."""
        if record.flags & FLAG_DESCRIPTOR:
            found = self._source.read(end, min(end + 24, self._directory.start))
            for signature in (_DESCRIPTOR_SIGNATURE, b""):
                for lengths in ("<2L", "<2Q"):
                    if lengths == "<2L" and max(record.nbytes, record.stored_bytes) > U32_MAX:
                        continue
                    sizes = struct.pack(lengths, record.stored_bytes, record.nbytes)
                    descriptor = signature + struct.pack("<L", record.crc) + sizes
                    if found.startswith(descriptor):
                        return len(descriptor)
        return 0

    def _put(self, data: bytes) -> None:
        self._segments.append(BytesSegment(data))
        self._written += len(data)

    def _flush(self, end: int | None = None) -> None:
        """Close the open copy."""
        end = self._taken if end is None else end
        if end > self._copy_from:
            self._segments.append(CopySegment(Span(self._copy_from, end), tuple(self._checks)))
            self._written += end - self._copy_from
        self._checks = []
        self._copy_from = end
