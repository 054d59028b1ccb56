"""torch reads every conversion with the planned tags and unchanged values."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckptmove
from ckptmove.errors import UnsupportedDtype
from ckptmove.opening.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unmeasured

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"
ENTRIES = [
    entry
    for entry in json.loads((SAMPLES / "MANIFEST.json").read_text())["samples"]
    if entry["container"] in {"torch-zip", "torch-legacy"}  # torch.load does not read the others by itself
]
TARGETS = ["cpu", "cuda:1", "mps"]
HOMES = {
    "adamw-cuda3.pth": "cuda:3",
    "rmsprop-centered-cuda0.pt": "cuda:0",
    "full-resume-cuda0.pt": "cuda:0",
    "legacy-adamw-cuda1.pth": "cuda:1",
    "legacy-shared-views.pth": "cuda:0",
}
LACKS_DTYPE = {("float64-cpu.pt", "mps"), ("dtype-zoo.pt", "mps")}

EVERY_SAMPLE = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS)


def tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, torch.nn.Module):
        yield from tensors(value.state_dict(), path)
    elif isinstance(value, argparse.Namespace):
        yield from tensors(vars(value), path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}.{index}")


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def load(path: Path, entry: dict, *, mmap: bool = False) -> tuple[object, Counter[str]]:
    """The object, and how many storages torch found under each tag."""
    seen: Counter[str] = Counter()

    def record(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
        seen[tag] += 1
        return storage

    return torch.load(path, map_location=record, weights_only=entry["weights_only"], mmap=mmap), seen


def planned_tags(path: Path, target: str) -> Counter[str]:
    result = ckptmove.convert(str(path), to=target, dry_run=True)
    edits = {edit.storage: edit.target for edit in result.plan.edits}
    with open_checkpoint(str(path)) as checkpoint:
        return Counter(edits.get(storage.key, storage.device) for storage in checkpoint.inventory.storages)


@EVERY_TARGET
@EVERY_SAMPLE
def test_torch_sees_the_planned_tags_and_the_same_values(entry: dict, target: str, tmp_path: Path) -> None:
    source, output = SAMPLES / entry["file"], tmp_path / "moved.pt"
    if (entry["file"], target) in LACKS_DTYPE:
        with pytest.raises(UnsupportedDtype):
            ckptmove.convert(str(source), to=target, output=str(output))
        assert not output.exists()
        return
    ckptmove.convert(str(source), to=target, output=str(output))
    before = list(tensors(load(source, entry)[0]))
    for mmap in (False, True)[: 1 if entry["container"] == "torch-legacy" else 2]:  # torch maps no legacy file
        moved, seen = load(output, entry, mmap=mmap)
        assert seen == planned_tags(source, target)
        after = list(tensors(moved))
        assert [name for name, _ in after] == [name for name, _ in before]
        for (name, old), (_, new) in zip(before, after, strict=True):
            assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride()), name
            assert bits(new) == bits(old), name
    assert ckptmove.convert(str(output), to=target, dry_run=True).plan.is_empty


@pytest.mark.parametrize("file", sorted(HOMES))
def test_there_and_back_is_the_same_file(file: str, tmp_path: Path) -> None:
    """Where one device is all that moves, the way back restores every byte."""
    source = SAMPLES / file
    home = HOMES[file]
    away, back = tmp_path / "away.pt", tmp_path / "back.pt"
    ckptmove.convert(str(source), to="xpu:0", output=str(away))
    ckptmove.convert(str(away), to=home, output=str(back))
    assert away.read_bytes() != source.read_bytes()
    assert back.read_bytes() == source.read_bytes()


def test_a_cast_is_what_torch_would_cast(tmp_path: Path) -> None:
    source, output = SAMPLES / "float64-cpu.pt", tmp_path / "mps.pt"
    ckptmove.convert(str(source), to="mps", output=str(output), cast=True)
    entry = {"weights_only": True}
    moved, seen = load(output, entry)
    assert set(seen) == {"mps", "cpu"}
    for (name, old), (_, new) in zip(tensors(load(source, entry)[0]), tensors(moved), strict=True):
        expected = old.to(torch.float32) if old.dtype == torch.float64 else old
        assert torch.equal(new, expected), name
        assert new.dtype == expected.dtype, name


def test_the_config_string_of_the_memo_trap_stays(tmp_path: Path) -> None:
    source = SAMPLES / "namespace-memo-trap.pth"
    entry = {"weights_only": False}
    for rewrite, expected in ((False, "cpu"), (True, "cuda:0")):
        output = tmp_path / f"moved-{rewrite}.pt"
        ckptmove.convert(str(source), to="cuda:0", output=str(output), rewrite_strings=rewrite)
        moved, seen = load(output, entry)
        assert seen["cuda:0"] == 12  # model and moments; step stays
        assert moved["args"].device == expected  # type: ignore[index]
