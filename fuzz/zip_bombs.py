"""Recipes for archives of ``torch.save`` that inflate, or whose central directory is large or wrong."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Final

from fuzz.seeds import STORAGE, archive_of, deflated, zip_of

if TYPE_CHECKING:
    from collections.abc import Callable

_SOUND: Final = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE + b"."
_BYTES: Final = {"0": bytes(16)}
#: Offset of each field of a central entry.
_FIELDS: Final = {
    "version made by": 4, "version needed": 6, "flags": 8, "method": 10, "time": 12, "date": 14, "CRC": 16,
    "compressed size": 20, "uncompressed size": 24, "name length": 28, "extra field length": 30,
    "comment length": 32, "disk": 34, "internal attributes": 36, "external attributes": 38, "offset": 42,
}  # fmt: skip
_ENTRY_BYTES: Final = 46


def inflation(size: int) -> dict[str, Callable[[], bytes]]:
    """Compressed records that inflate to many times their size."""
    zeros, sound, nodes = 200 * size, _SOUND, b"\x80\x02(" + b"]" * (10 * size) + b"l."
    return {
        "data.pkl": lambda: deflated({"a/data.pkl": bytes(zeros), "a/version": b"3"}),
        "data.pkl of nodes": lambda: deflated({"a/data.pkl": nodes, "a/version": b"3"}),
        "constants.pkl of nodes": lambda: deflated(
            {"a/data.pkl": sound, "a/data/0": bytes(16), "a/constants.pkl": nodes, "a/code/__torch__.py": b""}
        ),
        "constants.pkl of nodes, with other records stored": lambda: zip_of(
            {"a/data.pkl": b"\x80\x02}.", "a/code/__torch__.py": b""}, packed={"a/constants.pkl": nodes}
        ),
        "data.pkl of one node many times": lambda: deflated(
            {"a/data.pkl": b"\x80\x02(]q\x00" + b"h\x00" * (10 * size) + b"l.", "a/version": b"3"}
        ),
        "a storage": lambda: deflated({"a/data.pkl": sound, "a/data/0": bytes(zeros), "a/version": b"3"}),
        "byteorder": lambda: deflated({"a/data.pkl": sound, "a/byteorder": bytes(zeros), "a/version": b"3"}),
        "a wrong size": lambda: deflated({"a/data.pkl": sound, "a/data/0": bytes(zeros), "a/version": b"3"}).replace(
            struct.pack("<L", zeros), struct.pack("<L", 16)
        ),
        "a CRC of zero": lambda: deflated({"a/data.pkl": sound, "a/data/0": bytes(zeros), "a/version": b"3"}).replace(
            struct.pack("<L", zlib.crc32(bytes(zeros))), bytes(4)
        ),
        "overlapping records": lambda: _overlapping(sound, size // 100),
    }


def _overlapping(pickled: bytes, count: int) -> bytes:
    """An archive with many central entries for one deflated record."""
    sound = deflated({"a/data.pkl": pickled, "a/data/0": bytes(10_000_000)})
    end = sound.rindex(b"PK\5\6")
    start = sound.index(b"PK\1\2")
    second = sound.index(b"PK\1\2", start + 4)
    entry = sound[second:end]
    entries = b"".join(entry.replace(b"a/data/0", b"a/da%04d" % (place % 10_000)) for place in range(count))
    nbytes = end - start + len(entries)
    tail = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count + 2, count + 2, nbytes, start, 0)
    return sound[:end] + entries + tail


def structure(size: int) -> dict[str, Callable[[], bytes]]:
    """Large central directories, and wrong numbers of zip64."""
    pickled = _SOUND
    sound = archive_of(pickled, _BYTES)
    at = sound.rindex(b"PK\5\6")

    def wide(count: int, nbytes: int, start: int) -> bytes:
        end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, start)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        return sound[:at] + end64 + locator + end

    start, nbytes = struct.unpack_from("<LL", sound, at + 12)[::-1]
    return {
        "many records": lambda: archive_of(pickled, _BYTES | {str(one): b"" for one in range(1, size // 10)}),
        "long names": lambda: archive_of(
            pickled, _BYTES | {str(one) * 10_000: b"" for one in range(1, 1 + size // 10_000)}
        ),
        "zip64: 2**64 records": lambda: wide(2**64 - 1, nbytes, start),
        "zip64: a directory of 2**64 bytes": lambda: wide(3, 2**64 - 1, start),
        "zip64: a directory at 2**64": lambda: wide(3, nbytes, 2**64 - 1),
        "zip64: lengths of 2**64": lambda: sound.replace(
            struct.pack("<LL", 16, 16), struct.pack("<LL", 2**32 - 1, 2**32 - 1)
        ),
        "many ends": lambda: sound + b"PK\5\6" * (size // 100),
        "comments in every entry": lambda: archive_of(pickled, _BYTES | {f"x{one}": b"" for one in range(size // 100)}),
    }


def bits() -> dict[str, Callable[[], bytes]]:
    """Flip the lowest bit of each field of the central entries of the pickle and of a storage."""

    def flipped(record: bytes, offset: int) -> Callable[[], bytes]:
        def make() -> bytes:
            data = bytearray(archive_of(_SOUND, _BYTES))
            data[data.rindex(record) - _ENTRY_BYTES + offset] ^= 1
            return bytes(data)

        return make

    return {
        f"{record}: {field}": flipped(b"a/" + record.encode(), offset)
        for record in ("data.pkl", "data/0")
        for field, offset in _FIELDS.items()
    }
