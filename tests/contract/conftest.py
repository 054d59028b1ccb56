"""The specimens that the contract tests run on: a kind of container, and how to look at it with someone else's eyes."""

from __future__ import annotations

import io
import pickle
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.serialization import config

from ckptmove.containers.sniff import open_container
from ckptmove.model import Limits, StorageRef

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _state():
    generator = torch.Generator().manual_seed(1)
    tensors = {f"layer.{n}": torch.randn(n * 7, generator=generator, dtype=torch.float64) for n in (3, 0, 1, 40)}
    return tensors | {"ids": torch.arange(300), "mask": torch.ones(3, dtype=torch.bool)}


def _saved():
    stream = io.BytesIO()
    torch.save(_state(), stream)
    return stream.getvalue()


def _without_crcs():
    torch.serialization.set_crc32_options(False)
    try:
        return _saved()
    finally:
        torch.serialization.set_crc32_options(True)


def _aligned():
    with config.patch("save.storage_alignment", 4096):
        return _saved()


def _rezipped(compression, *, folder="archive", change=lambda name, data: data):
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_saved())) as old, zipfile.ZipFile(stream, "w", compression) as new:
        new.writestr(f"{folder}/", b"")
        for name in old.namelist():
            inside = name.partition("/")[2]
            new.writestr(f"{folder}/{inside}", change(inside, old.read(name)))
    return stream.getvalue()


def _big_endian():
    return _rezipped(zipfile.ZIP_STORED, change=lambda name, data: b"big" if name == "byteorder" else data)


@dataclass(frozen=True)
class Specimen:
    """A file of some container and what zipfile says of it."""

    make: Callable[[], bytes]
    byteorder: str = "little"
    checksums: bool = True
    deflated: bool = False
    #: Whether torch itself laid it out, so that there and back must be the same bytes.
    by_torch: bool = True
    alignment: int = 64


TORCH_ZIP = {
    "saved": Specimen(_saved),
    "without-crcs": Specimen(_without_crcs, checksums=False),
    "aligned-4096": Specimen(_aligned, alignment=4096),
    "stored-by-hand": Specimen(lambda: _rezipped(zipfile.ZIP_STORED), by_torch=False),
    "deflated-by-hand": Specimen(lambda: _rezipped(zipfile.ZIP_DEFLATED), deflated=True, by_torch=False),
    "big-endian": Specimen(_big_endian, byteorder="big", by_torch=False),
}


@dataclass(frozen=True)
class Opened:
    """A container, its file, and its records as zipfile reads them, by name without the folder."""

    specimen: Specimen
    path: Path
    container: object
    records: dict[str, bytes]

    def storages(self):
        """Storages as the pickle would name them, by record."""
        keys = [name.removeprefix("data/") for name in self.records if name.startswith("data/")]
        sizes = {key: len(self.records[f"data/{key}"]) for key in keys}
        return tuple(StorageRef(key, "cpu", "uint8", size, size, (), ()) for key, size in sizes.items())


def _records(path, specimen):
    with zipfile.ZipFile(path) as archive:
        if not specimen.checksums:
            for info in archive.infolist():
                archive.open(info)  # its header agrees
            data = path.read_bytes()
            return {
                info.filename.partition("/")[2]: data[start : start + info.file_size]
                for info in archive.infolist()
                for start in [info.header_offset + 30 + sum(data[info.header_offset + at] for at in (26, 28))]
            }
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(params=TORCH_ZIP)
def opened(request, tmp_path):
    specimen = TORCH_ZIP[request.param]
    path = tmp_path / "specimen.pt"
    path.write_bytes(specimen.make())
    container = open_container(str(path), Limits())
    yield Opened(specimen, path, container, _records(path, specimen))
    container.source.close()


@pytest.fixture
def pickle_of():
    """Another pickle, of any length from 14 bytes on; nothing reads it but the test."""

    def make(nbytes):
        return pickle.dumps("x", 2)[:2] + b"N" * (nbytes - 3) + b"."

    return make
