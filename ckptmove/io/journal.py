"""Encode and decode the journal of a change in place, which contains the bytes to restore.

It is durable before the first byte of the file changes, and removed after the last one has. A torn journal means that
nothing has changed yet.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Final, NamedTuple

from ckptmove.model import Span

_HEAD: Final = struct.Struct("<16s6QLHL")
_RUN: Final = struct.Struct("<3Q")
#: Includes the version of the format.
_MAGIC: Final = b"ckptmove undo 2\n"
_CRC_BYTES: Final = 4
#: Reason for rejecting a journal of another format.
UNKNOWN_JOURNAL: Final = "this version of ckptmove does not know its format"
#: Maximum length of a file: file offsets are signed.
_MOST_BYTES: Final = (1 << 63) - 1
#: Maximum length of an anchor. In a zip archive it covers the end of the directory, with the CRCs of the records.
ANCHOR_BYTES: Final = 1 << 16


class ChangedRange(NamedTuple):
    """A range of bytes before and after a change. Their lengths differ at the end of the file."""

    start: int  # offset of the range
    old: bytes  # bytes before the change
    new: bytes  # bytes after the change; empty if they are cut off


class Journal(NamedTuple):
    """State of a file before and after a change."""

    name: str  # name of the file, without its folder
    old_size: int  # its length before the change
    new_size: int  # its length after the change. During the change, the length is between the two.
    runs: tuple[ChangedRange, ...]  # all ranges that the change overwrites, appends or cuts off, in order
    anchors: tuple[Span, Span]  # unchanged bytes: right before the change, and at the end of the file after it
    anchor_crc: int  # CRC-32 of both anchors, to detect another file that was saved under the same name

    @property
    def old(self) -> tuple[tuple[int, bytes], ...]:
        """The writes that restore the file."""
        return tuple((run.start, run.old) for run in self.runs if run.old)

    @property
    def new(self) -> tuple[tuple[int, bytes], ...]:
        """The writes of the change."""
        return tuple((run.start, run.new) for run in self.runs if run.new)

    def encode(self) -> bytes:
        """Return the journal as bytes, with a CRC-32 of all others at the end."""
        name = os.fsencode(self.name)
        ends = [end for anchor in self.anchors for end in (anchor.start, anchor.end)]
        data = b"".join((
            _HEAD.pack(_MAGIC, self.old_size, self.new_size, *ends, self.anchor_crc, len(name), len(self.runs)),
            *(_RUN.pack(run.start, len(run.old), len(run.new)) for run in self.runs),
            name,
            *(data for run in self.runs for data in (run.old, run.new)),
        ))  # fmt: skip
        return data + zlib.crc32(data).to_bytes(_CRC_BYTES, "little")


def decode(data: bytes) -> Journal | None:
    """Decode the bytes of :meth:`Journal.encode`; None if they are incomplete."""
    body, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
    if len(body) < _HEAD.size or zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != crc:
        return None
    magic, old_size, new_size, *ends, anchor_crc, name_bytes, count = _HEAD.unpack_from(body)
    name_start = _HEAD.size + count * _RUN.size
    if magic != _MAGIC or name_start > len(body):
        raise ValueError(UNKNOWN_JOURNAL)
    position = name_start + name_bytes
    runs: list[ChangedRange] = []
    for start, old_bytes, new_bytes in _RUN.iter_unpack(body[_HEAD.size : name_start]):
        middle, end = position + old_bytes, position + old_bytes + new_bytes
        runs.append(ChangedRange(start, body[position:middle], body[middle:end]))
        position = end
    found = Journal(
        name=os.fsdecode(body[name_start : name_start + name_bytes]),
        old_size=old_size,
        new_size=new_size,
        runs=tuple(runs),
        anchors=(Span(*ends[:2]), Span(*ends[2:])),
        anchor_crc=anchor_crc,
    )
    if position != len(body) or not _is_possible(found):
        raise ValueError(UNKNOWN_JOURNAL)
    return found


def _is_possible(journal: Journal) -> bool:
    """Whether the numbers are of a change: what a file is longer before or after is in the journal, all of it."""
    shorter, longer = sorted((journal.old_size, journal.new_size))
    written = shorter
    for run in journal.runs:
        in_file = run.start + len(run.old) <= journal.old_size and run.start + len(run.new) <= journal.new_size
        if not in_file or run.start > written:
            return False
        written = max(written, run.start + max(len(run.old), len(run.new)))
    return written == longer <= _MOST_BYTES and all(
        anchor.start <= anchor.end <= min(anchor.start + ANCHOR_BYTES, shorter) for anchor in journal.anchors
    )
