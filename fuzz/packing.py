"""Encode a small directory (files, folders and links) as the bytes of one input.

All bytes decode to a directory with few and small files, and no path outside it.
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
#: An entry begins with its kind, the length of its name, and its size. The name and the content follow.
_HEAD_BYTES: Final = 4
_LARGEST: Final = 0xFFFF
_LINK: Final = 1
_FOLDER: Final = 2


class Entry(NamedTuple):
    """A file, folder or link in a directory.

    Attributes:
        kind: 1 for a link, 2 for a folder, any other number for a file.
        name: path relative to the directory, in any bytes.
        body: content of a file, or target of a link.
    """

    kind: int
    name: bytes
    body: bytes


def pack(entries: Iterable[Entry]) -> bytes:
    """Encode entries; long names and contents are truncated."""
    return b"".join(
        bytes([entry.kind, len(entry.name[:255])])
        + len(entry.body[:_LARGEST]).to_bytes(2, "little")
        + entry.name[:255]
        + entry.body[:_LARGEST]
        for entry in entries
    )


def packed(files: dict[str, bytes]) -> bytes:
    """Encode files, by path."""
    return pack(Entry(0, name.encode(), body) for name, body in files.items())


def unpack(data: bytes) -> list[Entry]:
    """Decode entries; the last one may be cut off."""
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
    """Write the directory of an input; the first of several entries of one name is used."""
    folder.mkdir(parents=True)
    for kind, name, body in unpack(data):
        path = folder.joinpath(*_parts(name))
        if path == folder:
            continue
        # The name exists already, or a file has the name of a parent folder.
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
    """The parts of a path, without ``..``."""
    parts = [part.replace(b"\0", b"")[:_LONGEST_PART] for part in name.split(b"/")]
    return [os.fsdecode(part) for part in parts if part not in {b"", b".", b".."}][:_DEEPEST]
