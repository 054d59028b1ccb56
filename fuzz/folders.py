"""Recipes for directories that need much time: loops of links, deep folders, many files."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from fuzz.payloads import text
from fuzz.seeds import STORAGE, archive_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SOUND: Final = archive_of(
    b"\x80\x02}" + text("weight") + b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE + b"s.", {"0": bytes(16)}
)


def folders(size: int) -> dict[str, Callable[[Path], None]]:
    """Recipes by name. Each makes a directory at a path.

    Args:
        size: number of files, or of entries in one file.
    """
    return {
        "many files": lambda path: _files(path, size // 10, lambda one: f"{one}.txt"),
        "more files than the limit": lambda path: _files(path, 201_000 if size >= 1_000_000 else 10, "x{}".format),
        "many checkpoints": lambda path: _files(path, size // 1000, lambda one: f"{one}.bin"),
        "a loop of links": _loop,
        "links to everything": _links,
        "folders in folders": lambda path: _deep(path, min(size, 900)),
        "an index of a million names": lambda path: _index(path, size),
        "an index of brackets": lambda path: _text(path, "pytorch_model.bin.index.json", "[" * size),
        "a long configuration": lambda path: _text(path, "config.json", '{"a": ' * size),
        "pipes and sockets": _pipes,
    }


def _files(path: Path, count: int, name: Callable[[int], str]) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(_SOUND)
    for one in range(count):
        (path / name(one)).write_bytes(_SOUND if name(one).endswith(".bin") else b"")


def _loop(path: Path) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(_SOUND)
    (path / "again").symlink_to(path)
    (path / "itself").symlink_to(path / "itself")
    (path / "there").symlink_to(path / "back")
    (path / "back").symlink_to(path / "there")


def _links(path: Path) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(_SOUND)
    (path / "root").symlink_to("/")
    (path / "zero.bin").symlink_to("/dev/zero")
    (path / "memory.pt").symlink_to("/proc/kcore")


def _deep(path: Path, depth: int) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(_SOUND)
    inner = path
    for _ in range(depth):
        inner /= "a"
        inner.mkdir()
    (inner / "model.bin").write_bytes(_SOUND)


def _index(path: Path, count: int) -> None:
    weights = {f"k{one}": f"pytorch_model-{one}.bin" for one in range(count // 4)}
    _text(path, "pytorch_model.bin.index.json", json.dumps({"weight_map": weights}))


def _text(path: Path, name: str, content: str) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(_SOUND)
    (path / name).write_text(content)


def _pipes(path: Path) -> None:
    path.mkdir()
    (path / "pytorch_model.bin").write_bytes(_SOUND)
    os.mkfifo(path / "optimizer.pt")
