"""Save a checkpoint on each mesh, and prove with ``verify --case`` that each mesh resumes it.

    python benchmarks/meshes.py

Every cell is a run of ``torchrun -m ckptmove verify``. If every check passed, it has the number of shards on all ranks
that equal their part of the checkpoint bit for bit, and whether one step equals that of a single process (*equal*: bit
for bit; *close*: within the tolerance of ``torch.testing.assert_close``). Otherwise it names the check that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptmove

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel.style import ParallelStyle

#: The meshes, and their numbers of ranks.
MESHES = {
    "one": 1,
    "ddp_2": 2,
    "fsdp_2": 2,
    "fsdp_3": 3,
    "hsdp_2x2": 4,
    "tp_2": 2,
    "fsdp_2_tp_2": 4,
    "fsdp_4_tp_2": 8,
}
#: No dimension is a multiple of all numbers of ranks.
WORDS, WIDTH, HIDDEN = 101, 26, 54


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    """Two layers between an embedding and its inverse, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.arange(7.0))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def distributed(model: Net, mesh: str) -> nn.Module:
    """Distribute a model over the ranks of a mesh."""
    size, sharded = dist.get_world_size(), None
    if mesh == "ddp_2":
        return nn.parallel.DistributedDataParallel(model)
    if "tp" in mesh:
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan: dict[str, ParallelStyle] = {"embed": RowwiseParallel(input_layouts=Replicate())}
        for index in range(len(model.layers)):
            plan |= {f"layers.{index}.up": ColwiseParallel(), f"layers.{index}.down": RowwiseParallel()}
        parallelize_module(model, both["tp"], plan | {"head": ColwiseParallel(output_layouts=Replicate())})
        sharded = both["dp"] if "fsdp" in mesh else None
    elif "fsdp" in mesh:
        sharded = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    elif "hsdp" in mesh:
        sharded = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for module in (*model.layers, model) if sharded else ():
        fully_shard(module, mesh=sharded)
    return model


def training(mesh: str) -> ckptmove.Case:
    """The training on a mesh."""
    torch.manual_seed(0)
    model = distributed(Net(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return ckptmove.Case(model, optimizer, batch=torch.randint(WORDS, (4, 6)), step=step, state=state)


def case(_: torch.device) -> ckptmove.Case:
    """The function of ``--case``."""
    return training(os.environ["MESH"])


def train(folder: str) -> None:
    """Make three steps, and save the state. Every rank calls this."""
    dist.init_process_group("gloo")
    resumed = training(os.environ["MESH"])
    assert isinstance(resumed.model, nn.Module)
    assert isinstance(resumed.optimizer, torch.optim.Optimizer)
    assert resumed.step is not None
    for _ in range(3):
        resumed.step(resumed.batch).backward()
        resumed.optimizer.step()
        resumed.optimizer.zero_grad()
    model, optimizer = get_state_dict(resumed.model, resumed.optimizer)
    save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    dist.barrier()  # a rank that ends first would close its connections
    dist.destroy_process_group()


def on_mesh(mesh: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Start a command with torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(MESHES[mesh])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MESH": mesh}
    return subprocess.run([*torchrun, *words], check=False, env=env, capture_output=True, text=True)


def outcome(checkpoint: Path, mesh: str) -> str:
    """The cell of the table for a checkpoint and a mesh."""
    report = checkpoint.parent / "report.json"
    report.unlink(missing_ok=True)
    words = ["-m", "ckptmove", "verify", str(checkpoint), "--to", "cpu", "--case", f"{__file__}:case"]
    ended = on_mesh(mesh, [*words, "--report", f"json={report}"])
    if not report.exists():
        raise SystemExit(ended.stderr)
    found = json.loads(report.read_text())
    if found["error"]:
        return str(found["error"]["message"])
    (result,) = found["results"]
    checks = {check["name"]: check for check in result["checks"]}
    if not result["proven"]:
        return ", ".join(name for name, check in checks.items() if check["status"] == "failed") or "not proven"
    exact = "equal" if checks["parity"]["evidence"]["exact"] else "close"
    return f"{exact}, {checks['restore']['evidence']['shards']}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    print("|".join(["", " saved by ", *(f" {mesh} " for mesh in MESHES), ""]))
    print("|---" * (len(MESHES) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for saved in MESHES:
            checkpoint = Path(folder, saved)
            on_mesh(saved, [__file__, "--train", str(checkpoint)]).check_returncode()
            cells = [outcome(checkpoint, mesh) for mesh in MESHES]
            print("|".join(["", f" {saved} ", *(f" {cell} " for cell in cells), ""]), flush=True)


if __name__ == "__main__":
    main()
