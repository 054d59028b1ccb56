"""Checkpoints in file objects."""

from __future__ import annotations

import io
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

import ckptmove
from ckptmove.errors import AccessFailed, ArchiveOfFiles, DamagedArchive, SourceChanged, UsageError
from ckptmove.io.file_object import FileObjectSource, location_of
from ckptmove.io.locations import OpenFile
from ckptmove.model import Span

SAMPLE = Path(__file__).resolve().parents[2] / "sample_ckpts" / "adamw-cuda3.pth"


class Slow(io.BytesIO):
    """Returns at most three bytes at a time."""

    def read(self, size=-1, /):
        return super().read(min(size, 3) if size >= 0 else 3)


def test_bytes_and_blocks() -> None:
    source = FileObjectSource(OpenFile(Slow(b"0123456789")))
    assert (source.path, source.size) == ("<Slow>", 10)
    assert source.read(1, 9) == b"12345678"
    assert [bytes(block) for block in source.blocks(Span(1, 10), 4)] == [b"1234", b"5678", b"9"]
    source.require_unchanged()
    source.close()
    with pytest.raises(DamagedArchive):
        source.read(1, 11)


def test_an_object_that_changes() -> None:
    file = io.BytesIO(b"0123")
    source = FileObjectSource(OpenFile(file))
    file.truncate(2)
    with pytest.raises(SourceChanged):
        source.require_unchanged()
    with pytest.raises(SourceChanged):
        source.read(0, 4)
    file.close()
    with pytest.raises(AccessFailed):
        source.read(0, 4)


def test_an_open_file_is_its_path(tmp_path) -> None:
    shutil.copy(SAMPLE, tmp_path / "run.pth")
    with (tmp_path / "run.pth").open("rb") as file:
        assert location_of(file) == str(tmp_path / "run.pth")
        (tmp_path / "run.pth").unlink()
        assert isinstance(location_of(file), OpenFile)
        assert ckptmove.inspect(file).inventory.tensors
    assert type(location_of(io.BytesIO())) is OpenFile


@pytest.mark.parametrize("kind", ["text", "pipe", "closed"])
def test_what_is_no_binary_file(kind) -> None:
    file = io.StringIO("a") if kind == "text" else io.BytesIO(b"a")
    if kind == "pipe":
        file.seekable = lambda: False
    if kind == "closed":
        file.close()
    with pytest.raises(UsageError):
        location_of(file)


def test_every_function_takes_one(tmp_path) -> None:
    file = io.BytesIO(SAMPLE.read_bytes())
    found = ckptmove.inspect(file, check=True)
    assert replace(found.inventory, path=str(SAMPLE)) == ckptmove.inspect(SAMPLE, check=True).inventory
    assert ckptmove.diff(file, SAMPLE).same
    ckptmove.convert(file, to="cpu", output=tmp_path / "moved.pth")
    ckptmove.convert(SAMPLE, to="cpu", output=tmp_path / "same.pth")
    assert (tmp_path / "moved.pth").read_bytes() == (tmp_path / "same.pth").read_bytes()
    for refused in (
        lambda: ckptmove.convert(file, to="cpu"),
        lambda: ckptmove.verify(file),
        lambda: ckptmove.verify(SAMPLE, against=file),
        lambda: ckptmove.undo(file),
    ):
        with pytest.raises(UsageError):
            refused()


def test_an_archive_of_files_needs_a_path(tmp_path) -> None:
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        archive.add(SAMPLE, "run.pth")
    with pytest.raises(ArchiveOfFiles):
        ckptmove.inspect(io.BytesIO((tmp_path / "run.tar").read_bytes()))
