"""Split tensors into the shards of a Hugging Face model, and write their index.

From ``split_state_dict_into_shards_factory`` and ``save_torch_state_dict`` of huggingface_hub; ``save_pretrained`` of
transformers splits with the same function.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from ckptmove.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.formats.safetensors_new import NewTensor

INDEX_NAME: Final = "model.safetensors.index.json"
_SIZE: Final = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMGT])(I?)B?\s*", re.IGNORECASE)
_POWERS: Final = "KMGT"


def parse_size(text: str) -> int:
    """Return the bytes of a size with a unit: ``5GB`` and ``5G`` have 5 * 10^9, ``5GiB`` has 5 * 2^30."""
    match = _SIZE.fullmatch(text)
    number, unit, binary = match.groups() if match is not None else ("0", "K", "")
    factor: int = (1024 if binary else 1000) ** (_POWERS.index(unit.upper()) + 1)
    nbytes = round(float(number) * factor)
    if not nbytes:
        raise UsageError(f"'{text[:40]}' is not a size with a unit, for example 5GB, 500MB or 2GiB")
    return nbytes


def split_shards(tensors: Sequence[NewTensor], shard_size: int) -> list[list[NewTensor]]:
    """Split tensors in their order. A tensor that is larger than a shard, in bytes, gets a shard of its own."""
    shards: list[list[NewTensor]] = []
    current: list[NewTensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes > shard_size:
            shards.append([tensor])
            continue
        if size + tensor.nbytes > shard_size:
            shards.append(current)
            current, size = [], 0
        current.append(tensor)
        size += tensor.nbytes
    return [*shards, current] if current or not shards else shards


def shard_names(count: int) -> list[str]:
    """Return the file names of a number of shards; a single one is ``model.safetensors``."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def shard_index(shards: Sequence[Sequence[NewTensor]], tied: Mapping[str, str]) -> bytes:
    """Return the content of ``model.safetensors.index.json``."""
    weight_map = {
        tensor.name: name for name, shard in zip(shard_names(len(shards)), shards, strict=True) for tensor in shard
    }
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {**tied, "total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
