"""torch and zipfile read a file converted in place like a new one; the undo restores every byte."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from ckptmove.api import functions as api

torch = pytest.importorskip("torch")

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"
#: Archives that torch.load reads, with stored records.
ENTRIES = [
    entry
    for entry in json.loads((SAMPLES / "MANIFEST.json").read_text())["samples"]
    if entry["container"] == "torch-zip" and entry["file"] != "zipped-again.pth"
]
EVERY_SAMPLE = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load(path, **options):
    """Everything that is in a file, as torch would save it now, and the tags that torch finds."""
    seen = Counter()

    def record(storage, tag):
        seen[tag] += 1
        return storage

    loaded = torch.load(path, map_location=record, **options)
    stream = io.BytesIO()
    torch.save(loaded, stream)
    with zipfile.ZipFile(stream) as archive:
        return {name: archive.read(name) for name in archive.namelist()}, seen


def records(path):
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.unmeasured
@EVERY_SAMPLE
@pytest.mark.parametrize("options", [{}, {"mmap": True}], ids=["read", "mapped"])
def test_torch_reads_it_as_it_reads_a_new_file(entry, options, tmp_path) -> None:
    path, new = tmp_path / "run.pth", tmp_path / "new.pth"
    shutil.copy(SAMPLES / entry["file"], path)
    before = sha256(path)
    for target in ("xpu:0", "cuda:1"):
        api.convert(str(path), to=target, output=str(new), force=True)
        result = api.convert(str(path), to=target, in_place=True)
        assert load(path, weights_only=entry["weights_only"], **options) == load(
            new, weights_only=entry["weights_only"], **options
        )
        if entry["file"] != "without-crcs.pth":  # zipfile treats a missing CRC as a wrong one
            assert records(path) == records(new)
        assert result.bytes_copied < 100_000
    api.undo(str(path))
    assert sha256(path) == before


@EVERY_SAMPLE
def test_a_new_file_of_it_is_the_new_file_of_the_original(entry, tmp_path) -> None:
    path, new, again = tmp_path / "run.pth", tmp_path / "new.pth", tmp_path / "again.pth"
    shutil.copy(SAMPLES / entry["file"], path)
    api.convert(str(path), to="xpu:0", output=str(new))
    api.convert(str(new), to="cuda:1", output=str(again))
    api.convert(str(path), to="xpu:0", in_place=True)
    if api.convert(str(path), to="cuda:1", output=str(tmp_path / "one.pth")).plan.is_empty:
        pytest.skip("nothing moves")
    assert sha256(tmp_path / "one.pth") == sha256(again)


@pytest.mark.unmeasured
def test_it_verifies(tmp_path) -> None:
    path = tmp_path / "run.pth"
    shutil.copy(SAMPLES / "adamw-cuda3.pth", path)
    api.convert(str(path), to="cpu", in_place=True)
    assert api.verify(str(path), to="cpu").proven


@pytest.fixture
def module(tmp_path):
    """A TorchScript archive with a constant that is traced, and so more pickles than one."""
    path = tmp_path / "module.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on the age of TorchScript
        traced = torch.jit.trace(torch.nn.Linear(3, 2), torch.ones(1, 3))
        torch.jit.save(traced, path)
    return path


def test_torch_reads_a_script_archive_too(module) -> None:
    before = sha256(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = torch.jit.load(module)
        for target in ("cuda:0", "mps", "cuda:1"):
            assert not api.convert(str(module), to=target, in_place=True).plan.is_empty
            assert {one.device for one in api.inspect(str(module)).inventory.tensors} == {target}
            loaded = torch.jit.load(module, map_location="cpu")
            assert torch.equal(loaded(torch.ones(1, 3)), wanted(torch.ones(1, 3)))
    api.undo(str(module))
    assert sha256(module) == before


@pytest.mark.skipif(not hasattr(torch.serialization, "skip_data"), reason="this torch saves nothing without its values")
@pytest.mark.parametrize("nbytes", [5 << 30, (1 << 32) - 3000])
def test_an_archive_that_needs_64_bits(tmp_path, nbytes) -> None:
    path = tmp_path / "huge.pt"
    with torch.serialization.skip_data():
        torch.save({"a": torch.ones(3), "huge": torch.empty(nbytes, dtype=torch.uint8), "y": torch.ones(5)}, path)
    size, blocks = path.stat().st_size, path.stat().st_blocks
    with path.open("rb") as file:
        ends = os.pread(file.fileno(), 1 << 16, 0), os.pread(file.fileno(), 1 << 16, size - (1 << 16))
    for target in ("cuda:0", "cuda:10", "mps"):
        api.convert(str(path), to=target, in_place=True)
        with zipfile.ZipFile(path) as archive:
            assert archive.read("huge/data.pkl").count(target.encode()) == 1
            assert archive.getinfo("huge/data/1").file_size == nbytes
            assert archive.getinfo("huge/data.pkl").header_offset >= size
        seen = set()
        loaded = torch.load(path, mmap=True, map_location=lambda storage, tag, seen=seen: seen.add(tag) or storage)
        assert seen == {target}
        assert loaded["huge"].nbytes == nbytes
    assert path.stat().st_blocks - blocks < 200  # of 512 bytes: the holes are still there
    api.undo(str(path))
    assert path.stat().st_size == size
    with path.open("rb") as file:
        assert ends == (os.pread(file.fileno(), 1 << 16, 0), os.pread(file.fileno(), 1 << 16, size - (1 << 16)))
