"""The journal of a change of a file: what it takes to put back what was there.

Never touches the file itself, and never knows what its bytes mean.

A journal stands beside its file, under a hidden name of fixed length that the file's own name gives: whoever opens the
file finds it by looking for one name. It is durable before the first byte of the file changes, and removed when the
last one is; one that is torn tells that nothing has changed yet.
"""

from __future__ import annotations

import os
import struct
import zlib
from typing import Final, NamedTuple

from ckptmove.io.changes import UNKNOWN_JOURNAL
from ckptmove.model import Span

_HEAD: Final = struct.Struct("<16s6QLHL")
_RUN: Final = struct.Struct("<3Q")
#: With the version of the format.
_MAGIC: Final = b"ckptmove undo 2\n"
_CRC_BYTES: Final = 4
#: What a file can be long at all: an offset of the system has a sign.
_MOST_BYTES: Final = (1 << 63) - 1
#: The most that an anchor may be long: in a zip archive it is the end of the directory, with the CRCs of the records.
ANCHOR_BYTES: Final = 1 << 16
_PREFIX: Final = ".ckptmove-"
_SUFFIX: Final = ".journal"


class Run(NamedTuple):
    """Some bytes of a file, before a change and after it; one is longer than the other where the file ends in them.

    Attributes:
        start: their offset.
        old: what was there.
        new: what the change writes there; empty where it cuts off.
    """

    start: int
    old: bytes
    new: bytes


class Journal(NamedTuple):
    """What a file was before a change, and what it is to be.

    Attributes:
        name: the file's own, without its folder.
        old_size: its length before.
        new_size: its length after the change; in between it is one of those that lie between both.
        runs: all that the change overwrites, appends or cuts off, in order.
        anchors: what the change leaves alone, right before it and at the end of the file behind it.
        anchor_crc: the CRC-32 of both: bytes of another file, saved under the name since, have another one.
    """

    name: str
    old_size: int
    new_size: int
    runs: tuple[Run, ...]
    anchors: tuple[Span, Span]
    anchor_crc: int

    @property
    def old(self) -> tuple[tuple[int, bytes], ...]:
        """What has to be written to take the change back."""
        return tuple((run.start, run.old) for run in self.runs if run.old)

    def encode(self) -> bytes:
        """The journal as bytes, which end with a CRC-32 of all before."""
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
    """The inverse of :meth:`Journal.encode`; None of bytes that are not all there.

    Raises:
        ValueError: they are all there, and no journal of this version, or of no change that could be made.
    """
    body, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
    if len(body) < _HEAD.size or zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != crc:
        return None
    magic, old_size, new_size, *ends, anchor_crc, name_bytes, count = _HEAD.unpack_from(body)
    name_start = _HEAD.size + count * _RUN.size
    if magic != _MAGIC or name_start > len(body):
        raise ValueError(UNKNOWN_JOURNAL)
    position = name_start + name_bytes
    runs: list[Run] = []
    for start, old_bytes, new_bytes in _RUN.iter_unpack(body[_HEAD.size : name_start]):
        middle, end = position + old_bytes, position + old_bytes + new_bytes
        runs.append(Run(start, body[position:middle], body[middle:end]))
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


def journal_name(name: str) -> str:
    """The name of a file's journal."""
    return f"{_PREFIX}{zlib.crc32(os.fsencode(name)):08x}{_SUFFIX}"


def is_journal(name: str) -> bool:
    """Whether a name is one of a journal."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def home_of(path: str) -> tuple[str, str]:
    """The folder of a file and its name there; of a symbolic link, those of the file that it leads to."""
    real = os.path.realpath(path) if os.path.islink(path) else path  # noqa: PTH114  # for every file that is opened: as text it costs less
    folder, name = os.path.split(real)
    return folder or os.curdir, name


def journal_path(path: str) -> str:
    """Where the journal of a file is: beside it."""
    folder, name = home_of(path)
    return os.path.join(folder, journal_name(name))  # noqa: PTH118  # a path stays as it was typed: a Path would drop "./" and a slash at its end
