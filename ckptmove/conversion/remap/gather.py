"""Gather the files of a checkpoint into the one value that a single new file holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, cast

from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.checkpoint.trainers import SHARD_FILE
from ckptmove.conversion.remap.errors import NotGathered
from ckptmove.pickles.tree import Call, Dict, Global, Tuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.checkpoint.directories import DirectoryInventory
    from ckptmove.pickles.tree import Value

_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".tar")


def require_gatherable(inventory: DirectoryInventory) -> None:
    """Raise NotGathered if the files hold the state of several runs, or of parts of parameters."""
    if inventory.sharding:
        raise NotGathered(inventory.path, inventory.sharding)
    if inventory.checkpoints:
        raise NotGathered(inventory.path, "it holds several checkpoints", inventory.checkpoints[-1])


def gather(root: Dict, path: str) -> Value:
    """The value of one file: a state_dict for its shards; a dict by file name for several files.

    Args:
        root: trees by the paths of their files.
        path: the checkpoint, for errors.

    Raises:
        NotGathered: if a key is in several shards, or a shard is not a dict.
    """
    groups: dict[str, list[tuple[str, Value]]] = {}
    for key, value, _ in root.pairs():
        groups.setdefault(_base(cast("str", key)), []).append((cast("str", key), value))
    values = [(name, _joined(files, path)) for name, files in groups.items()]
    if len(values) == 1:
        return values[0][1]
    flat: list[Value] = [item for pair in values for item in pair]
    return Dict(flat, [-1] * len(flat))


def _base(name: str) -> str:
    """Name of a file without its suffix, and without the number of a shard."""
    if SHARD_FILE.fullmatch(name):
        return name.rsplit("-", 3)[0]
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)


def _joined(files: Sequence[tuple[str, Value]], path: str) -> Value:
    if len(files) == 1:
        return files[0][1]
    root = Call(Global("collections", "OrderedDict"), Tuple((), ()), -1)
    root.assigned = joined = Dict([], [])
    seen: dict[Value, str] = {}
    for name, value in files:
        pairs = as_dict(value)
        if pairs is None:
            raise NotGathered(path, f"{name} is not a state_dict")
        for key, member, _ in pairs.pairs():
            if type(key) is str and seen.setdefault(key, name) != name:
                raise NotGathered(path, f"'{key}' is in {seen[key]} and in {name}")
            joined.flat += key, member
            joined.starts += -1, -1
    return root


def new_index(text: bytes, shards: Mapping[str, str], nbytes: int) -> bytes:
    """The index of shards with other keys.

    Args:
        text: the old index.
        shards: the file of each key.
        nbytes: total size of the tensors.
    """
    index = json.loads(text)  # it was read and checked before
    index["weight_map"] = dict(sorted(shards.items()))
    if isinstance(index.get("metadata"), dict) and "total_size" in index["metadata"]:
        index["metadata"]["total_size"] = nbytes
    return json.dumps(index, indent=2).encode() + b"\n"
