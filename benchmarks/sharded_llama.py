"""Write the ``.metadata`` of a 70B Llama with AdamW, as many ranks save it, beside files that are holes."""

from __future__ import annotations

import pickle
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, HIDDEN, KEYS, WORDS, LAYERS = 8192, 28672, 1024, 128256, 80
BLOCK = {
    "before.weight": (WIDTH,),
    "between.weight": (WIDTH,),
    "qkv.0.weight": (WIDTH, WIDTH),
    "qkv.1.weight": (KEYS, WIDTH),
    "qkv.2.weight": (KEYS, WIDTH),
    "out.weight": (WIDTH, WIDTH),
    "gate.weight": (HIDDEN, WIDTH),
    "up.weight": (HIDDEN, WIDTH),
    "down.weight": (WIDTH, HIDDEN),
}


def make(folder: Path, ranks: int) -> None:
    """Write the metadata of a checkpoint that some ranks saved, and files without content."""
    blocks = {f"layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in BLOCK.items()}
    shapes = {"embed.weight": (WORDS, WIDTH), **blocks, "norm.weight": (WIDTH,), "head.weight": (WORDS, WIDTH)}
    ends, where = [0] * ranks, {}
    tensors: dict[str, Any] = {}
    names = {f"model.{name}": shape for name, shape in shapes.items()}
    for key in ("exp_avg", "exp_avg_sq"):
        names |= {f"optim.state.{name}.{key}": shape for name, shape in shapes.items()}
    for name, shape in names.items():
        rows, pieces = -(-shape[0] // ranks), []
        for rank, first in enumerate(range(0, shape[0], rows)):
            offsets = torch.Size([first, *[0] * (len(shape) - 1)])
            sizes = torch.Size([min(rows, shape[0] - first), *shape[1:]])
            pieces.append(dcp.ChunkStorageMetadata(offsets, sizes))
            nbytes = prod(sizes) * 4 + 1400
            where[dcp.MetadataIndex(name, offsets)] = _StorageInfo(f"__{rank}_0.distcp", ends[rank], nbytes)
            ends[rank] += nbytes
        properties = dcp.TensorProperties(dtype=torch.float32)
        tensors[name] = dcp.TensorStorageMetadata(properties, torch.Size(shape), pieces)
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(end)
    paths = {name: tuple(name.split(".", 2)) for name in tensors}
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(tensors, planner_data=paths, storage_data=where)))
