"""Fixtures of the hostile tests: archives with any headers, and a payload module that creates a file on use."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `fuzz`, which is not part of the package


@dataclass(frozen=True)
class Record:
    """A record of an archive; ``local`` and ``central`` replace fields of its two headers."""

    name: bytes
    data: bytes
    local: dict[str, int] = field(default_factory=dict)
    central: dict[str, int] = field(default_factory=dict)
    local_name: bytes | None = None
    extra: bytes = b""

    def header(self) -> bytes:
        facts = self._facts() | self.local
        name = self.name if self.local_name is None else self.local_name
        return struct.pack(
            "<4s5H3L2H", b"PK\3\4", 20, facts["flags"], facts["method"], 0, 33, facts["crc"], facts["stored"],
            facts["size"], len(name), len(self.extra),
        ) + name + self.extra  # fmt: skip

    def entry(self, offset: int) -> bytes:
        facts = self._facts() | {"offset": offset} | self.central
        return struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 20, 20, facts["flags"], facts["method"], 0, 33, facts["crc"], facts["stored"],
            facts["size"], len(self.name), 0, 0, 0, 0, 0, facts["offset"],
        ) + self.name  # fmt: skip

    def _facts(self) -> dict[str, int]:
        return {"flags": 0, "method": 0, "crc": zlib.crc32(self.data), "stored": len(self.data), "size": len(self.data)}


def _end(count: int, nbytes: int, start: int, comment: bytes = b"") -> bytes:
    return struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, nbytes, start, len(comment)) + comment


def _build(*pieces: Record | bytes, comment: bytes = b"", behind: bytes = b"") -> bytes:
    """An archive of records in this order; bytes are written between the records."""
    data, entries = bytearray(), []
    for piece in pieces:
        if isinstance(piece, Record):
            entries.append(piece.entry(len(data)))
            data += piece.header() + piece.data
        else:
            data += piece
    directory = b"".join(entries)
    return bytes(data) + directory + _end(len(entries), len(directory), len(data), comment) + behind


def saved(value: object, **options: bool) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def object_pickle(value: object) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(value))) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))


@dataclass(frozen=True)
class Archives:
    """Makes archives of a small checkpoint, and of another one that can be confused with it."""

    Record = Record
    build = staticmethod(_build)
    end = staticmethod(_end)
    pickle: bytes
    other: bytes

    def records(self, **changed: Record) -> list[Record]:
        """Records of a valid checkpoint; ``data_pkl``, ``byteorder``, ``data_0`` or ``version`` may be replaced."""
        sound = {
            "data_pkl": Record(b"a/data.pkl", self.pickle),
            "byteorder": Record(b"a/byteorder", b"little"),
            "data_0": Record(b"a/data/0", struct.pack("<4f", 0, 1, 2, 3)),
            "version": Record(b"a/version", b"3\n"),
        }
        return list((sound | changed).values())


@pytest.fixture(scope="session")
def archives() -> Archives:
    return Archives(
        object_pickle({"weight": torch.arange(4.0), "n": 1}), object_pickle({"weight": torch.full((4,), 7.0), "n": 2})
    )


@pytest.fixture
def file_of(tmp_path: Path) -> Callable[[bytes], str]:
    """Write bytes to a file; return its path."""

    def file_of(data: bytes) -> str:
        path = tmp_path / "hostile.pt"
        path.write_bytes(data)
        return str(path)

    return file_of


@pytest.fixture
def trap(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path that exists only after the payload module is imported or one of its names is called."""
    folder = tmp_path_factory.mktemp("trap")
    marker = folder / "sprung"
    body = f"""
def spring(*args, **kwargs):
    open({str(marker)!r}, "a").close()

class Spring:
    __new__ = __init__ = __setstate__ = append = extend = __setitem__ = add = spring
spring()
"""
    (folder / "trap_module.py").write_text(body)
    monkeypatch.syspath_prepend(str(folder))
    yield marker
    sys.modules.pop("trap_module", None)
