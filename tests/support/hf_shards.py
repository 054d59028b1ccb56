"""Shards of a model, as torch's HuggingFaceStorageWriter writes them."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from ckptmove.formats.safetensors_shards import ShardName

#: Tensors of a model, with the axis of their shards (None: one rank has all) and the number of the file.
MODEL = {
    "emb.weight": (torch.arange(40.0).reshape(10, 4), 0, 1),
    "seen": (torch.arange(7, dtype=torch.float16), None, 1),
    "head.weight": (torch.arange(35, dtype=torch.bfloat16).reshape(5, 7), 1, 2),
    "head.bias": (torch.arange(9.0), 0, 2),
    "scale": (torch.tensor(3.0), None, 2),
    "none": (torch.zeros(0, 4), None, 2),
}


def write(folder, *, ranks=3, files=2):
    """Write the shards of each rank, as the writer does."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        for index in range(1, files + 1):
            tensors, offsets = {}, {}
            for name, (tensor, axis, home) in MODEL.items():
                parts = [tensor] if axis is None else tensor.chunk(ranks, axis)
                if home == index and rank < len(parts):
                    tensors[name] = parts[rank].contiguous()
                    start = [0] * tensor.dim()
                    if axis is not None:
                        start[axis] = sum(part.shape[axis] for part in parts[:rank])
                    offsets[name] = {"saved_offsets": start}
            notes = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            save_file(tensors, folder / ShardName(rank + 1, index, files).text, metadata=notes)
    return folder
