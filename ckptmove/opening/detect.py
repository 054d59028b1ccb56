"""Detect the layout of a directory from the names and the content of its files.

The name of the directory itself is not used.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.file_names import INDEX_FILE, SHARD_FILE
from ckptmove.checkpoint.trainers import (
    ACCELERATE_OPTIMIZER,
    MEGATRON_COMMON,
    POINTER_FILE,
    TRAINERS,
    Counters,
    agreed,
    file_role,
    read_counters,
    trainer_of,
)
from ckptmove.errors import DamagedArchive, LimitExceeded, MissingShard, UnreadableInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.checkpoint.directories import FileRecord
    from ckptmove.io.listing import ListedFile, Listing

#: Size limit of an index; the index of a million tensors is smaller.
_MOST_INDEX_BYTES: Final = 1 << 26
_POINTER_BYTES: Final = 4096
#: Size limit of a file with step counters. The history in transformers' trainer_state.json has a row for each log.
_MOST_COUNTER_BYTES: Final = 1 << 26


def require_shards(listing: Listing) -> None:
    """Check that no file of a sharded model is missing."""
    names = listing.names
    for file in listing.files:
        if is_index(file.name) and not file.is_hidden:
            prefix = f"{file.folder}/" if file.folder else ""
            for shard in _shards(listing, file.path):
                if prefix + shard not in names:
                    raise MissingShard(listing.full(file.path), shard)


def is_index(name: str) -> bool:
    """Whether a file is the index of a sharded model, which maps each tensor to its file."""
    return INDEX_FILE.fullmatch(name) is not None


def _shards(listing: Listing, name: str) -> Sequence[str]:
    path, text = listing.full(name), read_small(listing, name, _MOST_INDEX_BYTES)
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedArchive(path, "it is not valid JSON") from error
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(shard, str) for shard in weights.values()):
        raise DamagedArchive(path, "it has no weight_map")
    return sorted(set(weights.values()))


def layout_of(listing: Listing, records: Sequence[FileRecord]) -> str:
    """The layout of a directory: that of the topmost folder with a known layout."""
    by_path = {record.path: record for record in records}
    folders: dict[str, list[ListedFile]] = {}
    for file in listing.files:
        if not file.is_hidden:
            folders.setdefault(file.folder, []).append(file)
    for folder in sorted(folders, key=lambda folder: (folder.count("/") + bool(folder), folder)):
        files = folders[folder]
        layout_of = {file.name: by_path[file.path].layout for file in files if file.path in by_path}
        layout = _by_signs([file.name for file in files], layout_of) or _by_pointer(listing, folder, layout_of)
        if layout is not None:
            return layout
    return "sharded" if any(record.part is not None for record in records) else "other"


def trainer_counters(listing: Listing, layout: str) -> Counters:
    """The epoch and the step in the JSON file of a trainer; a file that cannot be read counts nothing."""
    name = trainer_of(layout).counters
    files = (file for file in listing.files if file.name == name and not file.is_hidden)
    return agreed(_counters_in(listing, file.path) for file in files)


def _counters_in(listing: Listing, path: str) -> Counters:
    try:
        found = json.loads(read_small(listing, path, _MOST_COUNTER_BYTES))
    except (UnreadableInput, LimitExceeded, ValueError, RecursionError):
        return Counters()
    pairs = found.items() if isinstance(found, dict) else ()
    return read_counters((key, value) for key, value in pairs if type(value) in {int, float})


def _by_signs(names: Sequence[str], layout_of: Mapping[str, str]) -> str | None:
    signs = [(trainer.layout, trainer.sign) for trainer in TRAINERS if trainer.sign]
    for layout, sign in signs:
        if any(re.fullmatch(sign, name) for name in names):
            return layout
    for layout, _ in signs:
        if layout in layout_of.values():
            return layout
    if ACCELERATE_OPTIMIZER in layout_of and any(file_role(name) == "model" for name in layout_of):
        return "accelerate"
    if "dcp" in layout_of.values():
        return "megatron" if MEGATRON_COMMON in names else "dcp"
    return "sharded" if any(map(SHARD_FILE.fullmatch, layout_of)) else None


def _by_pointer(listing: Listing, folder: str, layout_of: Mapping[str, str]) -> str | None:
    """Layout of the file that ``last_checkpoint`` names: mmengine writes a path, Detectron2 a name."""
    path = f"{folder}/{POINTER_FILE}".lstrip("/")
    if path not in listing.names:
        return None
    text = read_small(listing, path, _POINTER_BYTES).decode("utf-8", "replace")
    layout = layout_of.get(text.strip().replace("\\", "/").rpartition("/")[2])
    return layout if layout is not None and trainer_of(layout).is_pointed else None


def read_small(listing: Listing, path: str, most: int) -> bytes:
    """The bytes of a file that is not a checkpoint."""
    source = listing.open(path)
    try:
        if source.size > most:
            resource = f"the bytes of '{path.rpartition('/')[2]}'"
            raise LimitExceeded(resource, limit=most, actual=source.size, path=listing.full(path), is_fixed=True)
        return source.read(0, source.size)
    finally:
        source.close()
