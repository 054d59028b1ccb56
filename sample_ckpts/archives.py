"""Write the archives of older torch releases, of big-endian machines, and of zip programs."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

# The writer adds these by itself.
_WRITERS_OWN = ("version", ".data/serialization_id")


def saved(tree: object) -> bytes:
    """Bytes of `torch.save`, with the name `archive` for the folder."""
    stream = io.BytesIO()
    torch.save(tree, stream)
    return stream.getvalue()


def _records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def _write(path: Path, records: dict[str, bytes]) -> None:
    """Write records as torch does: stored, aligned to 64 bytes, in a folder of the file's name."""
    writer = torch._C.PyTorchFileWriter(str(path))  # noqa: SLF001  # the writer behind torch.save and torch.jit.save
    for name, data in records.items():
        if name not in _WRITERS_OWN:
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()


def _record(name: str, method: int) -> zipfile.ZipInfo:
    """A record without a date, with the attributes of Unix on every system."""
    record = zipfile.ZipInfo(name)
    record.compress_type, record.create_system = method, 3
    return record


def big_endian(tree: object, path: Path) -> None:
    """Save float32 tensors as a big-endian machine does."""
    records = _records(saved(tree))
    for name, data in records.items():
        if name.startswith("data/"):
            records[name] = np.frombuffer(data, "<f4").byteswap().tobytes()
    _write(path, {**records, "byteorder": b"big"})


def without_byteorder(tree: object, path: Path) -> None:
    """Save as torch 1.6 to 2.0 did, without the records of byte order and format."""
    later = ("byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in _records(saved(tree)).items():
            if name not in later:  # torch's writer would add byteorder by itself
                record = _record(f"{path.stem}/{name}", zipfile.ZIP_STORED)
                missing = -(archive.start_dir + 30 + len(record.filename) + 4) % 64
                record.extra = b"FB" + missing.to_bytes(2, "little") + b"Z" * missing
                archive.writestr(record, data)


def without_crcs(tree: object, path: Path) -> None:
    """Save without CRCs."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, path)
    finally:
        torch.serialization.set_crc32_options(True)


def renamed(tree: object, path: Path) -> None:
    """Save with another name for the folder than that of the file."""
    path.write_bytes(saved(tree))


def deflated(tree: object, path: Path) -> None:
    """Save, unzip and zip again with every record deflated.

    Level 0 writes the same bytes with every zlib. They begin with a deflate header, so a mapping reads garbage.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=0) as archive:
        for name, data in _records(saved(tree)).items():
            archive.writestr(_record(f"{path.stem}/{name}", zipfile.ZIP_DEFLATED), data)


def script(module: torch.nn.Module, path: Path) -> None:
    """Save with `torch.jit.save`, without the records that store paths of this machine."""
    stream = io.BytesIO()
    torch.jit.save(torch.jit.script(module), stream)
    _write(path, {name: data for name, data in _records(stream.getvalue()).items() if not name.endswith(".debug_pkl")})
