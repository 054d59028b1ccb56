"""Measure ``verify --fit 64x80GiB`` on a 70B model with AdamW that 64 ranks saved, without and with a case.

    python benchmarks/fit_case.py

The checkpoint is the ``.metadata`` that ``torch.distributed.checkpoint.save`` writes, with files that are holes. The
case is a Llama with the same parameters: ``fully_shard`` around each block, bfloat16 computation, recomputed
activations, and a batch of one sequence of 4,096 tokens.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812  # as in torch's documentation
from torch.utils.checkpoint import checkpoint

import ckptmove

RANKS, CAPACITY = 64, "80GiB"
WIDTH, HIDDEN, HEADS, KV_HEADS, WORDS, LAYERS = 8192, 28672, 64, 8, 128256, 80


class Block(nn.Module):
    """Attention with grouped heads, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.heads = [HEADS, KV_HEADS, KV_HEADS]
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, heads * size, bias=False) for heads in self.heads)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        normed = self.before(x)
        split = (one(normed).unflatten(-1, (heads, -1)) for one, heads in zip(self.qkv, self.heads, strict=True))
        query, key, value = (one.transpose(1, 2) for one in split)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        normed = self.between(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return result


class Llama(nn.Module):
    """A decoder with 70.6 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embed(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def case(device: torch.device) -> ckptmove.Case:
    """The training on one rank."""
    with torch.device("meta"):
        model = Llama()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(words: torch.Tensor) -> torch.Tensor:
        words = words.to(device)
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())

    return ckptmove.Case(model, optimizer, batch=torch.randint(WORDS, (1, 4097)), step=step)


def make(folder: Path, ranks: int = RANKS) -> None:
    """Write the metadata of a checkpoint that some ranks saved, and files without content."""
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in Llama().named_parameters()}
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
        tensors[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=torch.float32), shape, pieces)
    for rank, end in enumerate(ends):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(end)
    paths = {name: tuple(name.split(".", 2)) for name in tensors}
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(tensors, planner_data=paths, storage_data=where)))


def main() -> None:
    """Make the checkpoint, and measure both commands with ``/usr/bin/time``."""
    with tempfile.TemporaryDirectory() as name:
        make(Path(name))
        fit = ["verify", name, "--fit", f"{RANKS}x{CAPACITY}"]
        for words in (fit, [*fit, "--case", f"{__file__}:case"]):
            timed = ["/usr/bin/time", "-f", "%e s, %U s of a processor, %M KiB in the largest process"]
            os.spawnvp(os.P_WAIT, timed[0], [*timed, sys.executable, "-m", "ckptmove", *words])


if __name__ == "__main__":
    main()
