"""Save trained models from each of four ranks, and their full tensors from rank 0.

The argument is the output folder. Each kind is a folder in it, next to the ``KIND.full.pth`` of rank 0.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import forked_ranks
import torch
from torch import nn
from torch.utils._pytree import tree_map


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A model without an axis divisible by four."""

    def __init__(self, words=13, width=6, hidden=10):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.block = Block(width, hidden)
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, ids):
        return self.head(self.block(self.embedding(ids)))


def train(model, optimizer, seed, words=13):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        ids = torch.randint(words, (3, 4), generator=generator)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(kind, mesh_of):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Net()
    if kind == "strided":
        mesh = mesh_of((2, 2), mesh_dim_names=("dp", "tp"))
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "block.up": ColwiseParallel(),
            "block.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
    elif kind == "hsdp":
        mesh = mesh_of((2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = mesh_of((4,))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(out):
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = dist.get_rank()

    def mesh_of(*shape, **names):
        return init_device_mesh("cpu", *shape, **names)

    def full(value):
        return value.full_tensor() if isinstance(value, DTensor) else value

    for kind in ("verl", "strided", "hsdp", "accelerate"):
        folder = out / kind
        folder.mkdir(parents=True, exist_ok=True)
        model = sharded(kind, mesh_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        schedule.last_epoch = 2
        train(model, optimizer, 1 if kind == "strided" else rank)
        names, states = get_state_dict(model, optimizer)
        if kind == "verl":
            tree = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            for part, value in tree.items():
                torch.save(value, folder / f"{part}_world_size_4_rank_{rank}.pt")
            extra = {"lr_scheduler": schedule.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
            torch.save(extra, folder / f"extra_state_world_size_4_rank_{rank}.pt")
        elif kind == "accelerate":  # as accelerate.utils.fsdp_utils saves a SHARDED_STATE_DICT
            import torch.distributed.checkpoint as dcp

            tree = {"model": names, "optimizer": states}
            for part, name in (("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
                dcp.save({part: tree[part]}, storage_writer=dcp.FileSystemWriter(folder / name))
            states = {"random_state": (3,), "numpy_random_seed": (4,), "torch_manual_seed": torch.get_rng_state()}
            torch.save(states, folder / f"random_states_{rank}.pkl")
            if rank == 0:
                torch.save(schedule.state_dict(), folder / "scheduler.bin")
        else:
            rng = torch.get_rng_state()
            rng[-1] = rank
            tree = {"model": names, "optim": states, "step": 2, "rng": rng}
            torch.save(tree, folder / f"rank{rank:02}.pt")
        whole = tree_map(full, tree)
        if rank == 0:
            torch.save(whole, out / f"{kind}.full.pth")
    save_fsdp1(out, rank)
    dist.barrier()
    dist.destroy_process_group()


def save_fsdp1(out, rank):
    """Save the kinds of state_dicts of FSDP1, one file for each rank: ShardedTensors, and flattened parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Net(words=3), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    train(model, optimizer, rank, words=3)
    for kind in ("sharded", "local", "full"):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType[f"{kind.upper()}_STATE_DICT"]):
            own = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        if kind == "full":
            if rank == 0:
                torch.save(own, out / "fsdp1_sharded.full.pth")
            return
        for name, tree in ((kind, own), (f"{kind}_numbered", {**own, "optim": optimizer.state_dict()})):
            folder = out / f"fsdp1_{name}"
            folder.mkdir(exist_ok=True)
            torch.save(tree, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    sys.exit(forked_ranks.run(main, Path(sys.argv[1]), 4))
