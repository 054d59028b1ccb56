"""Lay out a new file of ``torch.save``.

Names and order of the records from torch/serialization.py ``_save``. Two records are left out. With
``.format_version``, torch computes the places of storages from their order in the pickle in place of reading them.
``.data/serialization_id`` identifies a save, and no reader needs it.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.formats.zip_archive.create import Record, new_archive
from ckptmove.io.contracts import BytesSegment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.io.contracts import Segment

#: torch's default, in bytes (``kFieldAlignment``).
_ALIGNMENT: Final = 64
#: ``kMinProducedFileFormatVersion``.
_VERSION: Final = b"3\n"


class NewStorage(NamedTuple):
    """A storage of a new file."""

    key: str  # its key in the pickle. torch numbers storages from 0, in decimal.
    segments: tuple[Segment, ...]  # its bytes
    crc: int | None  # their CRC-32. None: it is computed while they are written.


def new_torch_file(
    folder: str, pickle: bytes, storages: Sequence[NewStorage], byteorder: str = "little"
) -> tuple[Segment, ...]:
    """Segments of a file that ``torch.load`` reads, also with ``mmap=True``.

    torch names the folder by the stem of the file's name. The pickle needs protocol 2 for ``weights_only=True``.
    """
    return new_archive(folder, _records(pickle, storages, byteorder), _ALIGNMENT)


def _records(pickle: bytes, storages: Sequence[NewStorage], byteorder: str) -> Iterator[Record]:
    yield _held("data.pkl", pickle)
    yield _held(".storage_alignment", str(_ALIGNMENT).encode())
    yield _held("byteorder", byteorder.encode())
    for storage in storages:
        yield Record(f"data/{storage.key}", storage.segments, storage.crc)
    yield _held("version", _VERSION)


def _held(name: str, data: bytes) -> Record:
    return Record(name, (BytesSegment(data),), zlib.crc32(data))
