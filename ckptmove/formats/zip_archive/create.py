"""Lay out a new zip archive, byte for byte as the writer of ``torch.save`` does.

Records are stored without compression. Padding as in caffe2/serialize/inline_container.cc ``getPadding``, headers and
data descriptors as in torch's third_party/miniz ``mz_zip_writer_add_mem_ex_v2``.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.formats.zip_archive.headers import LOCAL, LOCAL_SIGNATURE
from ckptmove.formats.zip_archive.index import (
    FLAG_DESCRIPTOR,
    FLAG_UTF8,
    STORED,
    U32_MAX,
    ZIP64_EXTRA,
    emit_new_entry,
    emit_new_trailer,
    join_extra,
)
from ckptmove.formats.zip_archive.layout import PADDING_EXTRA, emit_descriptor
from ckptmove.io.contracts import BytesSegment, LateSegment, RunningCrc, Summed
from ckptmove.io.segments import length

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.io.contracts import Segment


class Record(NamedTuple):
    """A record of a new archive."""

    name: str  # its name in the folder
    segments: tuple[Segment, ...]  # its bytes
    crc: int | None  # their CRC-32. None: it is computed while they are written.


class _Entry(NamedTuple):
    """The fields of a record in the central directory."""

    name: bytes
    flags: int
    crc: RunningCrc
    nbytes: int
    offset: int


def new_archive(folder: str, records: Iterable[Record], alignment: int = 64) -> tuple[Segment, ...]:
    """Segments of a new archive with records in one folder, whose name has no slash.

    Names of records differ in more than case: torch ignores it. The data of each starts at a multiple of the alignment.
    """
    segments: list[Segment] = []
    entries: list[_Entry] = []
    offset = 0
    for record in records:
        name, crc = f"{folder}/{record.name}".encode(), RunningCrc(record.crc or 0)
        nbytes = sum(map(length, record.segments))
        # miniz writes no data descriptor after an empty record.
        flags = FLAG_UTF8 | FLAG_DESCRIPTOR if nbytes else FLAG_UTF8
        # As miniz: no stored length, because a descriptor follows; and the offset, which no reader uses.
        wide = ((nbytes, 0) if nbytes >= U32_MAX else ()) + ((offset,) if offset >= U32_MAX else ())
        header = _local_header(name, flags, wide, offset, alignment)
        segments.append(BytesSegment(header))
        entries.append(_Entry(name, flags, crc, nbytes, offset))
        offset += len(header) + nbytes
        if nbytes:
            descriptor = partial(_descriptor, crc, nbytes, is_wide=bool(wide))
            segments += record.segments if record.crc is not None else (Summed(record.segments, crc),)
            segments.append(LateSegment(len(descriptor()), descriptor))
            offset += length(segments[-1])
    directory = partial(_directory, entries, offset)
    return *segments, LateSegment(len(directory()), directory)


def _local_header(name: bytes, flags: int, wide: Sequence[int], offset: int, alignment: int) -> bytes:
    """A local header without CRC and lengths, padded so that the data after it is aligned."""
    extra = join_extra(((ZIP64_EXTRA, struct.pack(f"<{len(wide)}Q", *wide)),)) if wide else b""
    missing = -(offset + LOCAL.size + len(name) + len(extra) + 4) % alignment
    extra += join_extra(((PADDING_EXTRA, b"Z" * missing),))
    fixed = LOCAL.pack(LOCAL_SIGNATURE, 0, flags, STORED, 0, 0, 0, 0, 0, len(name), len(extra))
    return fixed + name + extra


def _descriptor(crc: RunningCrc, nbytes: int, *, is_wide: bool) -> bytes:
    return emit_descriptor(crc.value, nbytes, is_wide=is_wide)


def _directory(entries: Sequence[_Entry], start: int) -> bytes:
    directory = b"".join(
        emit_new_entry(entry.name, entry.flags, entry.crc.value, entry.nbytes, entry.offset) for entry in entries
    )
    return directory + emit_new_trailer(len(entries), len(directory), start)
