"""Parse the central directory of a zip archive, and write one for records that have moved.

Formats as in PKWARE's APPNOTE 4.3.12 to 4.5.3; zip64 as torch's miniz writes it.
"""

from __future__ import annotations

import struct
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from ckptmove.io.contracts import ByteSource
    from ckptmove.limits import Limits

STORED: Final = 0
DEFLATED: Final = 8
#: Other methods of Python's zipfile, by number, for messages.
_METHODS: Final = {12: "bzip2", 14: "lzma", 93: "zstd"}
FLAG_ENCRYPTED: Final = 0x0001
#: Also the flags of strong encryption and of a masked directory: miniz refuses a record with any of them.
_ALL_ENCRYPTED: Final = FLAG_ENCRYPTED | 0x0040 | 0x2000
_FLAG_PATCH: Final = 0x0020
FLAG_DESCRIPTOR: Final = 0x0008
FLAG_UTF8: Final = 0x0800
ZIP64_EXTRA: Final = 0x0001
#: MS-DOS bit of the external attributes.
_IS_FOLDER: Final = 0x10
#: Place in an entry of the system of its writer, and of the external attributes. Unix and macOS.
_HOST_AT: Final = 5
_ATTRIBUTES_AT: Final = 38
_ATTRIBUTES: Final = struct.Struct("<L")
_UNIX: Final = (3, 19)
U16_MAX: Final = 0xFFFF
U32_MAX: Final = 0xFFFFFFFF

CENTRAL: Final = struct.Struct("<4s4x2H4x3L4H2x2L")
CENTRAL_SIGNATURE: Final = b"PK\x01\x02"
END: Final = struct.Struct("<4s4H2LH")
END_SIGNATURE: Final = b"PK\x05\x06"
#: Length of an end record without a comment; torch writes no comment.
END_BYTES: Final = END.size
LOCATOR: Final = struct.Struct("<4sLQL")
LOCATOR_SIGNATURE: Final = b"PK\x06\x07"
END64: Final = struct.Struct("<4sQ2H2L4Q")
END64_SIGNATURE: Final = b"PK\x06\x06"
#: Bytes of a zip64 record that its size does not count.
_END64_HEAD: Final = 12
_SPLIT: Final = "it is one part of an archive that spans several files"
#: Offsets of fields inside a central entry.
_FLAGS_AT, _CRC_AT, _EXTRA_LENGTH_AT, _OFFSET_AT = 8, 16, 30, 42
#: Made by version 3.0 on Unix, needs version 4.5: the values of miniz.
_MADE_BY, _NEEDED = 0x031E, 45


class ZipRecord(NamedTuple):
    """An entry of the central directory."""

    place: int  # index of the entry in the directory
    name: str  # decoded name
    flags: int  # general purpose bits
    method: int  # `STORED`, `DEFLATED`, or an unsupported method
    crc: int  # CRC-32 of the inflated bytes; 0 if the writer left it out
    stored_bytes: int  # length in the archive
    nbytes: int  # length after inflating
    header_offset: int  # start of its local header

    @property
    def obstacle(self) -> str:
        """Why the record cannot be read; empty if it can."""
        return obstacle(self.flags, self.method)


def obstacle(flags: int, method: int) -> str:
    """Why a record with these flags and this method cannot be read; empty if it can."""
    if flags & _ALL_ENCRYPTED:
        return "encrypted"
    if flags & _FLAG_PATCH:
        return "a patch of something else"
    return "" if method in {STORED, DEFLATED} else f"compressed with {_METHODS.get(method) or f'method {method}'}"


class ZipRecords:
    """Entries of the central directory in its order, as columns: objects would take five times the memory."""

    __slots__ = (
        "crcs", "flags", "header_offsets", "methods", "name_bytes", "nbytes", "raw", "raw_starts", "stored_bytes",
    )  # fmt: skip

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.raw_starts = array("Q", [0])  # start of each entry in the directory, and the end of the last
        self.name_bytes, self.flags, self.methods = array("H"), array("H"), array("H")
        self.crcs = array("I")
        self.stored_bytes, self.nbytes, self.header_offsets = array("Q"), array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self.flags)

    def __iter__(self) -> Iterator[ZipRecord]:
        columns = self.flags, self.methods, self.crcs, self.stored_bytes, self.nbytes, self.header_offsets
        return map(ZipRecord, range(len(self)), self.names(), *columns)

    def __getitem__(self, place: int) -> ZipRecord:
        return ZipRecord(
            place, self.name(place), self.flags[place], self.methods[place], self.crcs[place],
            self.stored_bytes[place], self.nbytes[place], self.header_offsets[place],
        )  # fmt: skip

    def names(self) -> Iterator[str]:
        for start, length, flags in zip(self.raw_starts, self.name_bytes, self.flags, strict=False):
            begin = start + CENTRAL.size
            yield _decoded(self.raw[begin : begin + length], flags)

    def name(self, place: int) -> str:
        return _decoded(self.raw_name(place), self.flags[place])

    def raw_name(self, place: int) -> bytes:
        start = self.raw_starts[place] + CENTRAL.size
        return self.raw[start : start + self.name_bytes[place]]

    def entry(self, place: int) -> bytes:
        return self.raw[self.raw_starts[place] : self.raw_starts[place + 1]]

    def mode(self, place: int) -> int:
        """Return the type and the permission bits of a file, as a writer on Unix stores them; else 0."""
        entry = self.entry(place)
        (attributes,) = _ATTRIBUTES.unpack_from(entry, _ATTRIBUTES_AT)
        return attributes >> 16 if entry[_HOST_AT] in _UNIX else 0

    def in_file_order(self) -> Sequence[int]:
        """Return the places of the entries in the order of their headers."""
        offsets = self.header_offsets
        if all(before <= after for before, after in pairwise(offsets)):  # as every writer lists them
            return range(len(offsets))
        return sorted(range(len(offsets)), key=offsets.__getitem__)

    def by_offset(self) -> Iterator[ZipRecord]:
        """Return the entries in the order of their headers."""
        places = self.in_file_order()
        return iter(self) if isinstance(places, range) else map(self.__getitem__, places)


def _decoded(name: bytes, flags: int) -> str:
    return (
        name.decode() if name.isascii() else name.decode("utf-8" if flags & FLAG_UTF8 else "cp437", "backslashreplace")
    )


class Replacement(NamedTuple):
    """Fields of the directory entry of a rewritten record, stored plainly."""

    flags: int
    crc: int
    nbytes: int


class ZipDirectory(NamedTuple):
    """The central directory and all bytes after it."""

    records: ZipRecords  # its entries
    start: int  # offset of the directory in the file
    trailer: bytes  # bytes from the end of the directory to the end of the file
    end_at: int  # offset of the end-of-central-directory record in the trailer; zip64 records come before it
    shift: int  # bytes of the file before the archive, by which every offset in it is too small; 0 in a sound archive

    @property
    def bytes_after_end(self) -> int:
        """Bytes of the trailer after the end record: its comment, and anything after that."""
        return len(self.trailer) - self.end_at - END.size


def read_directory(source: ByteSource, limits: Limits) -> ZipDirectory:
    """Find and parse the central directory."""
    path = source.path
    end_offset, tail = last_end(source)
    if not tail:
        raise DamagedArchive(path, "truncated: the central directory at its end is missing")
    _, disk, start_disk, here, count, nbytes, start, _ = END.unpack_from(tail)
    if disk or start_disk or here != count:
        raise DamagedArchive(path, _SPLIT)
    trailer_start, end64_offset = end_offset, None
    if end_offset >= LOCATOR.size + END64.size:
        signature, _, offset, disks = LOCATOR.unpack(source.read(end_offset - LOCATOR.size, end_offset))
        if signature == LOCATOR_SIGNATURE:
            if disks != 1:
                raise DamagedArchive(path, _SPLIT)
            trailer_start, end64_offset = end_offset - LOCATOR.size - END64.size, offset
            wide = _read_end64(source, trailer_start)
            _agree(path, (count, nbytes, start), wide)
            count, nbytes, start = wide
    shift = trailer_start - nbytes - start
    if shift < 0:
        raise DamagedArchive(path, "its directory reaches past its end")
    if end64_offset not in {None, trailer_start - shift}:
        raise DamagedArchive(path, "its zip64 locator does not point to its zip64 record")
    if count > limits.records:
        raise LimitExceeded("records", limit=limits.records, actual=count, path=path)
    raw = source.read(trailer_start - nbytes, trailer_start)
    return ZipDirectory(
        records=_parse(raw, count, path),
        start=trailer_start - nbytes,
        trailer=source.read(trailer_start, end_offset) + tail,
        end_at=end_offset - trailer_start,
        shift=shift,
    )


def last_end(source: ByteSource) -> tuple[int, bytes]:
    """Offset of the last end record of a file, and the bytes from it on; none if no reader would find one."""
    start = max(0, source.size - END.size - U16_MAX)
    tail = source.read(start, source.size)
    at = tail.rfind(END_SIGNATURE, 0, max(0, len(tail) - END.size + len(END_SIGNATURE)))
    return (start + at, tail[at:]) if at >= 0 else (source.size, b"")


def _read_end64(source: ByteSource, start: int) -> tuple[int, int, int]:
    """Number of entries, size and offset of the directory, from the zip64 record right before its locator."""
    signature, size, _, _, disk, start_disk, here, count, nbytes, offset = END64.unpack(
        source.read(start, start + END64.size)
    )
    if signature != END64_SIGNATURE or size < END64.size - _END64_HEAD:
        raise DamagedArchive(source.path, "its zip64 record is not where its directory ends")
    # As ``mz_zip_reader_read_central_dir`` of torch's miniz, which accepts 1 for both disks too.
    if here != count or (disk, start_disk) not in {(0, 0), (1, 1)}:
        raise DamagedArchive(source.path, _SPLIT)
    return count, nbytes, offset


def _agree(path: str, narrow: tuple[int, int, int], wide: tuple[int, int, int]) -> None:
    """Raise DamagedArchive if the two end records disagree: readers would follow different directories."""
    for value, limit, full in zip(narrow, (U16_MAX, U32_MAX, U32_MAX), wide, strict=True):
        if value not in {limit, full}:
            raise DamagedArchive(path, f"its zip64 record has {full}, but its end record has {value}")


def _parse(raw: bytes, count: int, path: str) -> ZipRecords:
    records = ZipRecords(raw)
    position, end, unpack, fixed = 0, len(raw), CENTRAL.unpack_from, CENTRAL.size
    while position + fixed <= end:
        signature, flags, method, crc, stored, nbytes, name_n, extra_n, comment_n, disk, outer, offset = unpack(
            raw, position
        )
        name_end = position + fixed + name_n
        raw_end = name_end + extra_n + comment_n
        if signature != CENTRAL_SIGNATURE or raw_end > end:
            break
        place = len(records)
        records.raw_starts.append(raw_end)
        records.name_bytes.append(name_n)
        records.flags.append(flags)
        records.methods.append(method)
        records.crcs.append(crc)
        if max(nbytes, stored, offset) == U32_MAX:
            extra = raw[name_end : name_end + extra_n]
            nbytes, stored, offset = _widen(extra, (nbytes, stored, offset), path, records.name(place))
        records.stored_bytes.append(stored)
        records.nbytes.append(nbytes)
        records.header_offsets.append(offset)
        if disk > 1 or (outer & _IS_FOLDER and not records.name(place).endswith("/")):
            what = "in another file of a split archive" if disk > 1 else "a folder"
            raise DamagedArchive(path, f"record '{records.name(place)}' is marked as {what}")
        if method == STORED and stored != nbytes and not flags & FLAG_ENCRYPTED:
            name = records.name(place)
            raise DamagedArchive(path, f"record '{name}' is not compressed, but has two different lengths")
        position = raw_end
    if position != end or len(records) != count:
        raise DamagedArchive(path, f"its directory should have {count} entries, but {len(records)} are readable")
    return records


def _widen(extra: bytes, narrow: tuple[int, int, int], path: str, name: str) -> tuple[int, ...]:
    """Length, stored length and offset; the zip64 extra field holds, in this order, those that are full."""
    field = next((body for tag, body in split_extra(extra, path, name) if tag == ZIP64_EXTRA), b"")
    missing = narrow.count(U32_MAX)
    if len(field) < 8 * missing:
        raise DamagedArchive(path, f"record '{name}' has no zip64 lengths")
    wide = iter(struct.unpack_from(f"<{missing}Q", field))
    return tuple(next(wide) if value == U32_MAX else value for value in narrow)


def split_extra(extra: bytes, path: str, name: str) -> tuple[tuple[int, bytes], ...]:
    """Tags and bodies of the fields in an extra field."""
    fields: list[tuple[int, bytes]] = []
    position = 0
    while position < len(extra):
        tag, length = int.from_bytes(extra[position : position + 2], "little"), extra[position + 2 : position + 4]
        end = position + 4 + int.from_bytes(length, "little")
        if end > len(extra):
            raise DamagedArchive(path, f"record '{name}' has an extra field that reaches past its header")
        fields.append((tag, extra[position + 4 : end]))
        position = end
    return tuple(fields)


def join_extra(fields: Sequence[tuple[int, bytes]]) -> bytes:
    """The inverse of :func:`split_extra`."""
    return b"".join(struct.pack("<HH", tag, len(body)) + body for tag, body in fields)


def emit_directory(
    directory: ZipDirectory,
    start: int,
    offsets: Sequence[int],
    replaced: Mapping[int, Replacement],
    path: str,
    removed: Collection[int] = (),
) -> bytes:
    """Directory and trailer of the new archive; every byte of an entry that need not change stays.

    The directory begins at ``start``. ``offsets`` has the new header offset of each record in its order; ``replaced``
    has rewritten records, and ``removed`` those that are left out, by place.
    """
    records = directory.records
    pieces: list[bytes] = []
    for place, offset in enumerate(offsets):
        if place in removed:
            continue
        entry, replacement = records.entry(place), replaced.get(place)
        old = int.from_bytes(entry[_OFFSET_AT : _OFFSET_AT + 4], "little")
        if replacement is None and old < U32_MAX and offset < U32_MAX:
            entry = entry[:_OFFSET_AT] + struct.pack("<L", offset) + entry[_OFFSET_AT + 4 :]
        else:
            entry = _rebuild_entry(entry, records[place], offset, replacement, path)
        pieces.append(entry)
    return b"".join(pieces) + _emit_trailer(directory, len(pieces), start, sum(map(len, pieces)))


def _rebuild_entry(entry: bytes, record: ZipRecord, offset: int, replacement: Replacement | None, path: str) -> bytes:
    """A central entry with its zip64 extra field added, changed or removed."""
    _, flags, method, crc, stored, nbytes, name_n, extra_n, *_ = CENTRAL.unpack_from(entry)
    full = {"nbytes": record.nbytes, "stored": record.stored_bytes}
    if replacement is not None:
        flags, method, crc = replacement.flags, STORED, replacement.crc
        full = {"nbytes": replacement.nbytes, "stored": replacement.nbytes}
        nbytes = stored = min(replacement.nbytes, U32_MAX)
    wide = [value for value, narrow in ((full["nbytes"], nbytes), (full["stored"], stored)) if narrow == U32_MAX]
    wide += [offset] if offset >= U32_MAX else []
    name_end = CENTRAL.size + name_n
    others = split_extra(entry[name_end : name_end + extra_n], path, record.name)
    fields = [field for field in others if field[0] != ZIP64_EXTRA]
    if wide:
        fields.insert(0, (ZIP64_EXTRA, struct.pack(f"<{len(wide)}Q", *wide)))
    extra = join_extra(fields)
    return b"".join((
        entry[:_FLAGS_AT],
        struct.pack("<2H", flags, method),
        entry[_FLAGS_AT + 4 : _CRC_AT],
        struct.pack("<3L", crc, stored, nbytes),
        entry[_CRC_AT + 12 : _EXTRA_LENGTH_AT],
        struct.pack("<H", len(extra)),
        entry[_EXTRA_LENGTH_AT + 2 : _OFFSET_AT],
        struct.pack("<L", min(offset, U32_MAX)),
        entry[CENTRAL.size : name_end],
        extra,
        entry[name_end + extra_n :],
    ))  # fmt: skip


def _emit_trailer(directory: ZipDirectory, count: int, start: int, nbytes: int) -> bytes:
    """The end records; zip64 records if the source had them or the new archive needs them."""
    old64, end = directory.trailer[: directory.end_at], directory.trailer[directory.end_at :]
    few, *narrow = END.unpack_from(end)[4:7]
    # A field that the writer filled without need stays full.
    nbytes32, start32 = (
        U32_MAX if old == U32_MAX else min(new, U32_MAX) for old, new in zip(narrow, (nbytes, start), strict=True)
    )
    count16 = U16_MAX if old64 and few == U16_MAX else count
    end = end[:8] + struct.pack("<2H2L", count16, count16, nbytes32, start32) + end[20:]
    if not old64 and U32_MAX not in {nbytes32, start32}:
        return end
    versions = END64.unpack_from(old64)[2:4] if old64 else (_MADE_BY, _NEEDED)
    return _emit_end64(versions, count, nbytes, start) + end


def _emit_end64(versions: tuple[int, ...], count: int, nbytes: int, start: int) -> bytes:
    """The zip64 end record and its locator."""
    end64 = END64.pack(END64_SIGNATURE, END64.size - _END64_HEAD, *versions, 0, 0, count, count, nbytes, start)
    return end64 + LOCATOR.pack(LOCATOR_SIGNATURE, 0, start + nbytes, 1)


def emit_new_entry(name: bytes, flags: int, crc: int, nbytes: int, offset: int) -> bytes:
    """A central entry for a record of a new archive, as ``mz_zip_writer_add_to_central_dir`` of miniz writes it."""
    wide = [value for value in (nbytes, nbytes, offset) if value >= U32_MAX]
    extra = join_extra(((ZIP64_EXTRA, struct.pack(f"<{len(wide)}Q", *wide)),)) if wide else b""
    narrow, lengths = min(nbytes, U32_MAX), (len(name), len(extra))
    fields = (flags, STORED, crc, narrow, narrow, *lengths, 0, 0, 0, min(offset, U32_MAX))
    return CENTRAL.pack(CENTRAL_SIGNATURE, *fields) + name + extra


def emit_new_trailer(count: int, nbytes: int, start: int) -> bytes:
    """The end records of a new archive; torch always writes those of zip64."""
    few = min(count, U16_MAX)
    end = END.pack(END_SIGNATURE, 0, 0, few, few, min(nbytes, U32_MAX), min(start, U32_MAX), 0)
    return _emit_end64((_MADE_BY, _NEEDED), count, nbytes, start) + end
