"""A small directory as one input: its files, folders and links in a row of bytes, and back.

Never makes anything outside of the folder that it is given, and never many or large files: whatever the bytes are, they
stand for a directory within bounds.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_MOST_ENTRIES: Final = 16
_DEEPEST: Final = 4
_LONGEST_PART: Final = 60
#: Kind, length of the name, and size; the name and the content follow.
_HEAD_BYTES: Final = 4
_LARGEST: Final = 0xFFFF
_LINK: Final = 1
_FOLDER: Final = 2


class Entry(NamedTuple):
    """Something in a directory.

    Attributes:
        kind: a link at 1, a folder at 2, and a file at every other number.
        name: its path seen from the directory, in any bytes.
        body: content of a file, target of a link.
    """

    kind: int
    name: bytes
    body: bytes


def pack(entries: Iterable[Entry]) -> bytes:
    """Entries as one input; what does not fit in it is cut off."""
    return b"".join(
        bytes([entry.kind, len(entry.name[:255])])
        + len(entry.body[:_LARGEST]).to_bytes(2, "little")
        + entry.name[:255]
        + entry.body[:_LARGEST]
        for entry in entries
    )


def packed(files: dict[str, bytes]) -> bytes:
    """Files by path as one input."""
    return pack(Entry(0, name.encode(), body) for name, body in files.items())


def unpack(data: bytes) -> list[Entry]:
    """The entries that an input stands for; the last may have less than it says."""
    entries: list[Entry] = []
    position = 0
    while position + _HEAD_BYTES <= len(data) and len(entries) < _MOST_ENTRIES:
        kind, length = data[position], data[position + 1]
        middle = position + _HEAD_BYTES + length
        end = middle + int.from_bytes(data[position + 2 : position + 4], "little")
        entries.append(Entry(kind, data[position + _HEAD_BYTES : middle], data[middle:end]))
        position = end
    return entries


def lay_out(data: bytes, folder: Path) -> None:
    """Make the directory that an input stands for; of two entries of one name, the first."""
    folder.mkdir(parents=True)
    for kind, name, body in unpack(data):
        path = folder.joinpath(*_parts(name))
        if path == folder:
            continue
        # A file stands where a folder should, or something of that name is there.
        with suppress(FileExistsError, NotADirectoryError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == _FOLDER:
                path.mkdir()
            elif kind == _LINK:
                path.symlink_to(os.path.relpath(folder.joinpath(*_parts(body)), path.parent))
            else:
                with path.open("xb") as file:
                    file.write(body)


def _parts(name: bytes) -> list[str]:
    """The parts of a path, none of which leads up."""
    parts = [part.replace(b"\0", b"")[:_LONGEST_PART] for part in name.split(b"/")]
    return [os.fsdecode(part) for part in parts if part not in {b"", b".", b".."}][:_DEEPEST]
