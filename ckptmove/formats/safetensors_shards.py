"""The names and the metadata of safetensors files that each contain chunks of tensors.

``torch.distributed.checkpoint.HuggingFaceStorageWriter`` writes these files, one or more for each rank. Their metadata
has the offsets of each chunk, but not the shapes of whole tensors: as in torch, a tensor ends where its chunks end.

From torch/distributed/checkpoint/_hf_utils.py and hf_storage.py (``HuggingFaceStorageReader.read_metadata``).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import DamagedArchive
from ckptmove.formats.chunks import Chunk

if TYPE_CHECKING:
    from collections.abc import Mapping

#: ``SHARDED_FILE_NAME``: the rank from 1, the index of the file from 1, and the number of files.
_FILE: Final = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")
#: ``DCP_SHARDING_INFO_KEY`` and ``SAVED_OFFSETS_KEY``.
_CHUNKS: Final = "DCP_SHARDING_INFO"
_OFFSETS: Final = "saved_offsets"
_SHOWN: Final = 80


class ShardName(NamedTuple):
    """The parts of the name of a shard."""

    rank: int  # the rank that wrote it, from 1
    number: int  # its number among the files of the rank, from 1
    files: int  # number of files over which the tensors are distributed

    @property
    def text(self) -> str:
        """The name of the file."""
        return f"shard-{self.rank:05}-model-{self.number:05}-of-{self.files:05}.safetensors"


def shard_name(name: str) -> ShardName | None:
    """The parts of the name of a file; None if it is not a shard."""
    match = _FILE.fullmatch(name)
    return None if match is None else ShardName(*map(int, match.groups()))


def chunk_offsets(notes: Mapping[str, str], path: str) -> Mapping[str, object]:
    """The metadata of each tensor's chunk in a shard, by name; empty if the file has none."""
    try:
        found = json.loads(notes.get(_CHUNKS, "{}"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise DamagedArchive(path, f"its {_CHUNKS} is not a JSON object")
    return found


def chunk_at(name: str, shape: tuple[int, ...], offsets: Mapping[str, object], path: str) -> Chunk:
    """The chunk of a tensor in a shard, by :func:`chunk_offsets`; without them it begins at the first element."""
    if not offsets:
        return Chunk((0,) * len(shape), shape)
    match offsets.get(name):
        case {"saved_offsets": [*start]} if len(start) == len(shape):
            if all(type(one) is int and one >= 0 for one in start):
                return Chunk(tuple(start), shape)
    raise DamagedArchive(path, f"its {_CHUNKS} has no valid {_OFFSETS} for tensor {name[:_SHOWN]!r}")
