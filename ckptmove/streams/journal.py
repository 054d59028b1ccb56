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
from dataclasses import dataclass
from typing import Final

from ckptmove.model import Span

_HEAD: Final = struct.Struct("<16s4QLHL")
_RUN: Final = struct.Struct("<2Q")
#: With the version of the format.
_MAGIC: Final = b"ckptmove undo 1\n"
_CRC_BYTES: Final = 4
#: The most that an anchor may be long: in a zip archive it is the end of the directory, with the CRCs of the records.
ANCHOR_BYTES: Final = 1 << 16
_UNKNOWN: Final = "it is none of this version of ckptmove"
_PREFIX: Final = ".ckptmove-"
_SUFFIX: Final = ".journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """What a file was before a change.

    Attributes:
        name: the file's own, without its folder.
        old_size: its length before.
        new_size: its length after the change; in between it is one of those that lie between both.
        old: offsets, and the bytes there that the change overwrites or cuts off.
        anchor: a run of bytes that the change leaves alone.
        anchor_crc: their CRC-32: bytes of another file, saved under the name since, have another one.
    """

    name: str
    old_size: int
    new_size: int
    old: tuple[tuple[int, bytes], ...]
    anchor: Span
    anchor_crc: int

    def encode(self) -> bytes:
        """The journal as bytes, which end with a CRC-32 of all before."""
        name = os.fsencode(self.name)
        sizes = self.old_size, self.new_size, self.anchor.start, self.anchor.end
        data = b"".join((
            _HEAD.pack(_MAGIC, *sizes, self.anchor_crc, len(name), len(self.old)),
            *(_RUN.pack(start, len(run)) for start, run in self.old),
            name,
            *(run for _, run in self.old),
        ))  # fmt: skip
        return data + zlib.crc32(data).to_bytes(_CRC_BYTES, "little")


def decode(data: bytes) -> Journal | None:
    """The inverse of :meth:`Journal.encode`; None of bytes that are not all there.

    Raises:
        ValueError: they are all there, and no journal of this version.
    """
    body, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
    if len(body) < _HEAD.size or zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != crc:
        return None
    magic, old_size, new_size, anchor_start, anchor_end, anchor_crc, name_bytes, count = _HEAD.unpack_from(body)
    name_start = _HEAD.size + count * _RUN.size
    is_sound = magic == _MAGIC and name_start <= len(body) and anchor_start <= anchor_end <= old_size
    if not is_sound or anchor_end - anchor_start > ANCHOR_BYTES:
        raise ValueError(_UNKNOWN)
    position = name_start + name_bytes
    old: list[tuple[int, bytes]] = []
    for start, nbytes in _RUN.iter_unpack(body[_HEAD.size : name_start]):
        if start + nbytes > old_size:
            raise ValueError(_UNKNOWN)
        old.append((start, body[position : position + nbytes]))
        position += nbytes
    if position != len(body):
        raise ValueError(_UNKNOWN)
    return Journal(
        name=os.fsdecode(body[name_start : name_start + name_bytes]),
        old_size=old_size,
        new_size=new_size,
        old=tuple(old),
        anchor=Span(anchor_start, anchor_end),
        anchor_crc=anchor_crc,
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
    return os.path.join(folder, journal_name(name))  # noqa: PTH118  # likewise
