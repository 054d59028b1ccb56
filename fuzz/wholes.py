"""Inspect, show and convert a directory or an archive, and check the invariant, in a temporary folder.

The invariant is that of the harness. In addition, the source is unchanged, only the output is new, and files that are
not checkpoints are copied byte for byte.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.checkpoint.parts import FilePart
from ckptmove.conversion.convert import convert
from ckptmove.conversion.plan import plan_move
from ckptmove.errors import ArchiveOfFiles, CkptMoveError
from ckptmove.formats.opening import recognise
from ckptmove.io.part import MemorySource
from ckptmove.opening.checkpoint import open_checkpoint
from fuzz.harness import (
    LIMITS,
    REQUESTS,
    asked_for,
    bytes_of,
    in_each_way,
    require,
    require_planned,
    show_checkpoint,
    show_result,
)
from fuzz.packing import lay_out

if TYPE_CHECKING:
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.moves import MoveRequest

#: The content of a folder, by path: the bytes of a file, the target of a link, None for a folder.
Content: TypeAlias = dict[str, "bytes | str | None"]
#: A folder in memory, if the system has one: outputs are synced, which is slow on a disk.
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  # the folders in it are made by tempfile
_OUTPUTS: Final = frozenset(f"output.{request.to}" for request in REQUESTS)


@dataclass(frozen=True, slots=True)
class _Read:
    """A directory or an archive that was read.

    Attributes:
        directory: the open checkpoint.
        storages: bytes of each storage, by key.
        files: bytes of each file that is not moved, by path; None if it cannot be opened.
    """

    directory: OpenCheckpoint
    storages: dict[str, bytes | None]
    files: dict[str, bytes | None]


def examine_archive(data: bytes) -> None:
    """Inspect an archive with every flag, show it in every format, and convert it in three ways."""
    with suppress(ArchiveOfFiles):
        recognise(MemorySource("input", data))
        return  # a checkpoint: another target covers it
    with folder_in_memory() as folder:
        path = Path(folder, "input")
        path.write_bytes(data)
        _examine(path)
        require(path.read_bytes() == data, "the source has changed")


def examine_directory(data: bytes) -> None:
    """Do the same with a directory, and read its trees as ``verify`` does."""
    with folder_in_memory() as folder:
        path = Path(folder, "input")
        lay_out(data, path)
        before = content_of(path)
        try:
            _examine(path)
            with suppress(CkptMoveError), open_checkpoint(str(path), LIMITS, keep_trees=True):
                pass
        finally:
            require(content_of(path) == before, "the source has changed")


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A new folder, which is removed at the end of the context."""
    return tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)


def _examine(path: Path) -> None:
    before = _read(str(path))
    show_checkpoint(before.directory, before.directory.outline, before.directory.inventory.facts)
    in_each_way(lambda request: _convert(path, before, request))


def _convert(path: Path, before: _Read, request: MoveRequest) -> None:
    output = path.parent / f"output.{request.to}"
    try:
        result = convert(asked_for(str(path), request, str(output)))
    except CkptMoveError:
        require(not output.exists(), "a refused conversion left an output")
        raise
    finally:
        require({one.name for one in path.parent.iterdir()} <= {path.name, *_OUTPUTS}, "a new file was left")
    show_result(result)
    try:
        after = _read(str(output))
    except CkptMoveError as error:
        raise AssertionError("the output cannot be read") from error
    require(plan_move(after.directory.inventory, request).is_empty, "a converted checkpoint would be converted again")
    require_planned(
        (before.directory.inventory, before.storages), result.plan, (after.directory.inventory, after.storages)
    )
    require(before.files == after.files, "a file that is not a checkpoint has changed")


def _read(path: str) -> _Read:
    with open_checkpoint(path, LIMITS, check=True, outline=True) as checkpoint:
        return _Read(checkpoint, bytes_of(checkpoint), _others(checkpoint))


def _others(checkpoint: OpenCheckpoint) -> dict[str, bytes | None]:
    """The bytes of files that are only copied, as those of a distributed checkpoint are."""
    moved = {part.name for part in checkpoint.parts if isinstance(part, FilePart)}
    found: dict[str, bytes | None] = {}
    listing = checkpoint.listing
    for file in listing.files if listing is not None else ():
        if listing is not None and file.path not in moved:
            found[file.path] = None
            with suppress(CkptMoveError):  # compressed, and either damaged or too large
                source = listing.open(file.path)
                found[file.path] = source.read(0, source.size)
                source.close()
    return found


def content_of(folder: Path) -> Content:
    """Every file with its bytes, every link with its target, and every folder."""
    found: Content = {}
    for home, folders, files in os.walk(folder):
        for path in (Path(home, name) for name in (*folders, *files)):
            if path.is_symlink():
                found[str(path)] = str(path.readlink())
            else:
                found[str(path)] = path.read_bytes() if path.is_file() else None
    return found
