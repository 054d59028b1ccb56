"""The layout of a new zip archive: which bytes of the old one are kept, and which are written anew.

Never decides what a record holds, and never copies a byte itself: it hands out segments.

Padding as in torch's caffe2/serialize/inline_container.cc ``getPadding``: an extra field ``FB`` of at least four bytes
moves the data of a record to the first aligned offset. Only the header behind a record that changed its length is
written anew; from there on everything has moved by a multiple of the alignment, and goes as one block.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive
from ckptmove.formats.zip_archive.index import (
    FLAG_DESCRIPTOR,
    FLAG_ENCRYPTED,
    STORED,
    U16_MAX,
    U32_MAX,
    ZIP64_EXTRA,
    Replacement,
    ZipDirectory,
    ZipRecord,
    emit_directory,
    join_extra,
    split_extra,
)
from ckptmove.io.contracts import BytesSegment, CheckedRange, CopySegment
from ckptmove.model import Span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.io.contracts import ByteSource, Segment

_LOCAL: Final = struct.Struct("<4s5H3L2H")
_LOCAL_SIGNATURE: Final = b"PK\x03\x04"
_DESCRIPTOR_SIGNATURE: Final = b"PK\x07\x08"
_PADDING_EXTRA: Final = int.from_bytes(b"FB", "little")
#: The least that stands before a record's data.
LOCAL_BYTES: Final = _LOCAL.size
#: Where its two lengths stand.
_LENGTHS: Final = slice(18, 26)
#: Flag bits that say how hard a record was deflated.
_DEFLATE_FLAGS: Final = 0x0006
#: Headers of small records are read many at a time; those with more than so many bytes between them, alone.
_WINDOW: Final = 1 << 16
_FAR: Final = 1 << 12
#: CRC and lengths of a local header where a data descriptor has them.
_LEFT_OPEN: Final = bytes(12)


class LocalHeader(NamedTuple):
    """What stands before a record's data.

    Attributes:
        fixed: its first 30 bytes.
        name: the record's name as bytes.
        data_start: where the data starts in the file.
    """

    fixed: bytes
    name: bytes
    data_start: int


class NewRecord(NamedTuple):
    """A record that gets other bytes, stored plainly.

    Attributes:
        segments: give the bytes.
        nbytes: how many they are.
        crc: their CRC-32, or 0 in an archive without CRCs.
    """

    segments: tuple[Segment, ...]
    nbytes: int
    crc: int


class LocalHeaders:
    """Reads local headers, neighbours together."""

    def __init__(self, source: ByteSource, directory: ZipDirectory) -> None:
        self._source = source
        self._directory = directory
        self._window = b""
        self._window_start = 0

    def read(self, record: ZipRecord) -> LocalHeader:
        """The local header of a record.

        Raises:
            DamagedArchive: there is none, it names another record or contradicts the directory, or the data reaches
                into the directory.
        """
        name = self._directory.raw_name(record)
        start = record.header_offset
        head = self._bytes(start, start + _LOCAL.size + len(name))
        data_start = start + len(head) + self._check(record, name, head)
        if data_start + record.stored_bytes > self._directory.start:
            raise DamagedArchive(self._source.path, f"record '{record.name}' reaches into the directory")
        return LocalHeader(head[: _LOCAL.size], name, data_start)

    def check_all(self) -> None:
        """Look at the local header of every record that has one before the directory.

        Raises:
            DamagedArchive: one names another record, or contradicts the directory.
        """
        raw, last = self._directory.raw, self._directory.start
        group: list[tuple[ZipRecord, int]] = []
        begin = done = 0
        for record in sorted(self._directory.records, key=_offset):
            start, entry = record.header_offset, record.raw_start
            end = start + _LOCAL.size + raw[entry + 28] + 256 * raw[entry + 29]
            if end > last:
                continue  # past the end: there is no header to look at
            if start - done > _FAR or end - begin > _WINDOW:
                self._check_group(group, begin, done)
                group, begin = [], start
            group.append((record, end))
            done = max(done, end)
        self._check_group(group, begin, done)

    def _check_group(self, group: list[tuple[ZipRecord, int]], begin: int, done: int) -> None:
        """Look at local headers that are near each other; those that miniz and zipfile write agree in their bytes."""
        raw, data = self._directory.raw, self._source.read(begin, done)
        for record, end in group:
            entry, at = record.raw_start, record.header_offset - begin
            agree = (
                data.startswith(_LOCAL_SIGNATURE, at)
                and data[at + 4 : at + 14] == raw[entry + 6 : entry + 16]
                and data[at + 14 : at + 26] in {_LEFT_OPEN, raw[entry + 16 : entry + 28]}
                and data[at + 26 : at + 28] == raw[entry + 28 : entry + 30]
                and raw.startswith(data[at + _LOCAL.size : end - begin], entry + 46)
            )
            if not agree:
                self._check(record, self._directory.raw_name(record), data[at : end - begin])

    def extra_fields(self, record: ZipRecord, header: LocalHeader) -> tuple[tuple[int, bytes], ...]:
        """The extra fields of a local header.

        Raises:
            DamagedArchive: they do not fill it.
        """
        start = record.header_offset + _LOCAL.size + len(header.name)
        return split_extra(self._bytes(start, header.data_start), self._source.path, record.name)

    def _check(self, record: ZipRecord, name: bytes, head: bytes) -> int:
        """Compare a local header with the directory, and return the length of its extra field."""
        fields = _LOCAL.unpack_from(head)
        if fields[0] != _LOCAL_SIGNATURE or fields[9] != len(name) or head[_LOCAL.size :] != name:
            raise DamagedArchive(self._source.path, f"the header before record '{record.name}' is of another record")
        if _contradicts(fields, record):
            raise DamagedArchive(
                self._source.path, f"the header before record '{record.name}' contradicts the directory"
            )
        length: int = fields[10]
        return length

    def _bytes(self, start: int, end: int) -> bytes:
        if start < self._window_start or end > self._window_start + len(self._window):
            size = self._source.size
            if end > size:
                raise DamagedArchive(self._source.path, f"a record's header reaches past the end, at byte {start}")
            self._window = self._source.read(start, max(end, min(start + _WINDOW, size)))
            self._window_start = start
        return self._window[start - self._window_start : end - self._window_start]


def _offset(record: ZipRecord) -> int:
    return record.header_offset


def _contradicts(fields: tuple[int, ...], record: ZipRecord) -> bool:
    """Whether a local header tells of other bytes than the directory, which torch goes by; what it leaves open is 0.

    A CRC that the directory leaves out is compared with nothing.
    """
    _, _, flags, method, _, _, crc, stored, nbytes, _, _ = fields
    if method != record.method or (flags ^ record.flags) & FLAG_ENCRYPTED:
        return True
    if record.crc and crc not in {0, record.crc}:
        return True
    return stored not in {0, U32_MAX, record.stored_bytes} or nbytes not in {0, U32_MAX, record.nbytes}


class Layout:
    """Lays out one archive, record by record in the order of the file."""

    def __init__(self, source: ByteSource, directory: ZipDirectory, alignment: int) -> None:
        """Begin at the first byte.

        Args:
            source: the archive.
            directory: its directory.
            alignment: what the distance that the data of a record moves is a multiple of; with 1, nothing is padded.
        """
        self._source = source
        self._directory = directory
        self._alignment = alignment
        self._headers = LocalHeaders(source, directory)
        self._segments: list[Segment] = []
        self._checks: list[CheckedRange] = []
        #: Up to where the source is laid out, and, where no copy is open, the length of the output so far.
        self._taken = 0
        self._copy_from = 0
        self._written = 0

    def build(self, new: Mapping[int, NewRecord]) -> tuple[Segment, ...]:
        """Segments of the archive with some records written anew.

        Args:
            new: by place in the directory.

        Raises:
            DamagedArchive: records overlap, or a header does not belong to its record.
        """
        offsets = [0] * len(self._directory.records)
        replaced: dict[int, Replacement] = {}
        for record in sorted(self._directory.records, key=lambda record: record.header_offset):
            header = self._headers.read(record)
            if record.header_offset < self._taken:
                raise DamagedArchive(self._source.path, f"record '{record.name}' lies inside another one")
            offset = offsets[record.place] = self._at(record.header_offset)
            change = new.get(record.place)
            if change is not None:
                replaced[record.place] = self._replace(record, header, change, offset)
            elif (offset - record.header_offset) % self._alignment:
                self._realign(record, header, offset)
                self._keep(record, header)
            else:
                self._keep(record, header)
        if not new:
            self._taken = self._source.size
            self._flush()
            return tuple(self._segments)
        self._taken = self._directory.start
        self._flush()
        self._put(emit_directory(self._directory, self._written, offsets, replaced, self._source.path))
        return tuple(self._segments)

    def append(self, new: Mapping[int, NewRecord], between: bytes) -> bytes:
        """Bytes that, behind the whole source, make an archive of it with some records written anew.

        Args:
            new: by place in the directory.
            between: what stands before the new directory.

        Raises:
            DamagedArchive: a header does not belong to its record.
        """
        self._written = self._source.size
        offsets = [record.header_offset for record in self._directory.records]
        replaced: dict[int, Replacement] = {}
        for place, change in new.items():
            record = self._directory.records[place]
            offsets[place] = self._written
            replaced[place] = self._emit(record, self._headers.read(record), change, self._written)
        self._put(between)
        self._put(emit_directory(self._directory, self._written, offsets, replaced, self._source.path))
        return b"".join(segment.data for segment in self._segments if isinstance(segment, BytesSegment))

    def _at(self, source_offset: int) -> int:
        """Where a byte of the open copy comes to lie in the output."""
        return self._written + source_offset - self._copy_from

    def _keep(self, record: ZipRecord, header: LocalHeader) -> None:
        end = header.data_start + record.stored_bytes
        if record.crc and record.method == STORED:
            self._checks.append(CheckedRange(Span(header.data_start, end), record.crc, record.name))
        self._taken = end

    def _realign(self, record: ZipRecord, header: LocalHeader, offset: int) -> None:
        """Write a kept record's header anew, so that its data moves by a multiple of the alignment."""
        self._flush(record.header_offset)
        others = tuple(field for field in self._headers.extra_fields(record, header) if field[0] != _PADDING_EXTRA)
        extra = self._pad(others, record, offset + _LOCAL.size + len(header.name), header.data_start)
        self._put(header.fixed[:28] + struct.pack("<H", len(extra)) + header.name + extra)
        self._copy_from = self._taken = header.data_start

    def _replace(self, record: ZipRecord, header: LocalHeader, change: NewRecord, offset: int) -> Replacement:
        """Write a record anew in the place of the old one."""
        self._flush(record.header_offset)
        replacement = self._emit(record, header, change, offset)
        end = header.data_start + record.stored_bytes
        self._copy_from = self._taken = end + self._descriptor_bytes(record, end)
        return replacement

    def _emit(self, record: ZipRecord, header: LocalHeader, change: NewRecord, offset: int) -> Replacement:
        """Header, bytes and, where the source has one, data descriptor of a record that is written anew."""
        flags = record.flags & ~_DEFLATE_FLAGS
        described = bool(flags & FLAG_DESCRIPTOR)
        # Python's zipfile can be told to write lengths so however small they are, and stable-baselines3 tells it.
        was_wide = not described and header.fixed[_LENGTHS] == b"\xff" * 8
        # As miniz: no stored length where a descriptor follows, and the offset too, where no reader looks for it.
        is_wide = was_wide or change.nbytes >= U32_MAX
        sizes = (change.nbytes, 0 if described else change.nbytes) if is_wide else ()
        wide = (*sizes, offset) if offset >= U32_MAX else sizes
        others = [
            field
            for field in self._headers.extra_fields(record, header)
            if field[0] not in {_PADDING_EXTRA, ZIP64_EXTRA}
        ]
        if wide:
            others.insert(0, (ZIP64_EXTRA, struct.pack(f"<{len(wide)}Q", *wide)))
        congruent = header.data_start if record.method == STORED else 0
        extra = self._pad(tuple(others), record, offset + _LOCAL.size + len(header.name), congruent)
        narrow = U32_MAX if is_wide else change.nbytes
        said = (0, 0, 0) if described else (change.crc, narrow, narrow)
        fixed = header.fixed[:6] + struct.pack("<2H", flags, STORED) + header.fixed[10:14] + struct.pack("<3L", *said)
        self._put(fixed + struct.pack("<2H", len(header.name), len(extra)) + header.name + extra)
        self._segments += change.segments
        self._written += change.nbytes
        if described:
            lengths = struct.pack("<2Q" if wide else "<2L", change.nbytes, change.nbytes)
            self._put(_DESCRIPTOR_SIGNATURE + struct.pack("<L", change.crc) + lengths)
        return Replacement(flags, change.crc, change.nbytes)

    def _pad(self, others: tuple[tuple[int, bytes], ...], record: ZipRecord, start: int, congruent: int) -> bytes:
        """Extra fields and the padding that puts the data at the first offset congruent to another one."""
        extra = join_extra(others)
        if self._alignment == 1:
            return extra
        first = start + len(extra) + 4
        missing = (congruent - first) % self._alignment
        if len(extra) + 4 + missing > U16_MAX:
            raise DamagedArchive(self._source.path, f"record '{record.name}' has no room to be aligned")
        return extra + join_extra(((_PADDING_EXTRA, b"Z" * missing),))

    def _descriptor_bytes(self, record: ZipRecord, end: int) -> int:
        """Length of the data descriptor behind a record's data; 0 where none agrees with the directory."""
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
