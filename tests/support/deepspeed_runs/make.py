"""Make the checkpoints of this folder: ``torchrun --nproc-per-node RANKS make.py STAGE OUT [WORD...]``, with DeepSpeed.

Words: bf16, frozen, groups, round-robin, sub-groups, fp32-accumulation, fused, experts, small. Then ``make.py reference
OUT`` writes ``reference.pt``: the weights and moments by name, gathered by DeepSpeed's ``zero_to_fp32``. It does not
read what ``BF16_Optimizer`` writes. Made with DeepSpeed 0.19.8 and torch 2.13 on the CPU; OUT is kept as a zip.

With the word experts, on four ranks, the model has experts. The run is loaded again, each rank writes what DeepSpeed
then has (``reference_RANK.pt``), and ``make.py join OUT`` joins these files. After ``round_robin_gradients``, DeepSpeed
links the fp32 weights in the wrong order, so that run has no reference. Made from DeepSpeed's source of August 2026
with ``TORCHDYNAMO_DISABLE=1``.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed  # type: ignore[import-not-found]
import torch
from deepspeed.moe.layer import MoE  # type: ignore[import-not-found]
from deepspeed.moe.utils import (  # type: ignore[import-not-found]
    split_params_into_different_moe_groups_for_optimizer as split,
)
from deepspeed.ops.adam import FusedAdam  # type: ignore[import-not-found]
from deepspeed.utils import (  # type: ignore[import-not-found]
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found]
    get_fp32_state_dict_from_zero_checkpoint as gather,
)
from torch import distributed, nn


class Net(nn.Module):
    """A tied weight, a frozen weight, a buffer that is not floating, and sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(37, 6)
        self.l1 = nn.Linear(6, 5)
        self.bn = nn.LayerNorm(5)
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("count", torch.tensor(4))
        self.l2 = nn.Linear(5, 6)
        self.head = nn.Linear(6, 37, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, ids):
        return self.head(self.l2(self.bn(torch.relu(self.l1(self.emb(ids))))) * self.scale)


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6, bias=False)

    def forward(self, values):
        return self.down(torch.relu(self.up(values)))


class Mixture(nn.Module):
    """Two layers with different numbers of experts, on two ranks of expert parallelism."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(37, 6)
        self.one = MoE(6, Expert(5), num_experts=4, ep_size=2, k=1, use_rts=False, min_capacity=16)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("seen", torch.arange(3.0))
        self.two = MoE(6, Expert(3), num_experts=2, ep_size=2, k=1, use_rts=False, min_capacity=16)
        self.head = nn.Linear(6, 37, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        values = self.emb(ids)
        found, first, _ = self.one(values)
        values = self.norm(values + found)
        found, second, _ = self.two(values)
        return self.head(values + found), first + second


def mixture(stage, words):
    torch.manual_seed(0)
    model = Mixture()
    torch.manual_seed(50 + distributed.get_rank() % 2)  # each expert has values of its own
    for name, parameter in model.named_parameters():
        if "deepspeed_experts" in name:
            parameter.data = torch.randn_like(parameter) * 0.3
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "round_robin_gradients": "round-robin" in words},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "bf16" in words},
    }
    all_of_them = [*model.parameters()]
    groups = [{"params": all_of_them, "name": "all"}]
    if "groups" in words:
        groups = [
            {"params": [one for one in all_of_them if one.dim() > 1], "name": "decay", "weight_decay": 0.1},
            {"params": [one for one in all_of_them if one.dim() <= 1], "name": "none", "weight_decay": 0.0},
        ]
    groups = split(groups, **({"max_group_size": 60} if "small" in words else {}))
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return model, engine


def train_experts(stage, out, words):
    deepspeed.init_distributed("gloo")
    rank = distributed.get_rank()
    model, engine = mixture(stage, words)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(3):
        ids = torch.randint(37, (4, 6), generator=generator)
        logits, balance = engine(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        engine.backward(loss + 0.01 * balance.float())
        engine.step()
    engine.save_checkpoint(out, tag="global_step3", client_state={"note": "hi"})
    distributed.barrier()
    model, engine = mixture(stage, words)
    engine.load_checkpoint(out, tag="global_step3")
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {"module": {}, "fp32": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, value in model.state_dict().items():
        found["module"][global_name(name, rank % 2)] = value.clone()
    for name, parameter in model.named_parameters():
        own = global_name(name, rank % 2)
        found["fp32"][own] = safe_get_full_fp32_param(parameter).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[key][own] = safe_get_full_optimizer_state(parameter, key).clone()
    torch.save(found, f"{out}/reference_{rank}.pt")
    distributed.barrier()


def global_name(name, share):
    head, experts, tail = name.partition("deepspeed_experts.")
    if not experts:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}{experts}{share * {'one': 2, 'two': 1}[name[:3]] + int(number)}.{rest}"


def join(out):
    found = {}
    for path in sorted(out.glob("reference_*.pt")):
        for key, values in torch.load(path).items():
            found.setdefault(key, {}).update(values)
        path.unlink()
    module, fp32 = found.pop("module"), found["fp32"]
    fp32["head.weight"] = fp32["emb.weight"]
    found["fp32"] = {name: fp32.get(name, value) for name, value in module.items()}
    torch.save(found, out / "reference.pt")


def train(stage, out, words):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Net()
    if "frozen" in words:
        model.l1.weight.requires_grad_(False)
        model.l2.bias.requires_grad_(False)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {"round_robin_gradients": True} if "round-robin" in words else {}
    zero |= {"sub_group_size": 100} if "sub-groups" in words else {}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    config |= {"bf16": {"enabled": True}} if "bf16" in words else {}
    config |= {"data_types": {"grad_accum_dtype": "fp32"}} if "fp32-accumulation" in words else {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = trained
    if "groups" in words:
        groups = [
            {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
        ]
    optimizer = (FusedAdam if "fused" in words else torch.optim.AdamW)(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(100 + distributed.get_rank())
    for _ in range(3):
        ids = torch.randint(37, (4, 6), generator=generator)
        engine.backward(nn.functional.cross_entropy(engine(ids).flatten(0, 1).float(), ids.flatten()))
        engine.step()
    engine.save_checkpoint(out, tag="global_step3", client_state={"note": "hi"})
    distributed.barrier()


def reference(out):
    """Moments are gathered as weights are: they take the place of the fp32 partitions in a copy."""
    files = [path.relative_to(out) for path in sorted(out.glob("*/*_optim_states.pt"))]
    (model, *_) = [torch.load(path, weights_only=False) for path in sorted(out.glob("*/*model_states.pt"))]
    names = {name for group in model["param_shapes"] for name in group}
    names |= {name for name, source in model["shared_params"].items() if source in names}
    found = {"fp32": {name: value.clone() for name, value in gather(str(out)).items()}}
    for key in ("exp_avg", "exp_avg_sq"):
        copy = Path(shutil.copytree(out, f"{out}.{key}"))
        for file in files:
            tree = torch.load(copy / file, weights_only=False)
            state = tree["optimizer_state_dict"]
            own = state.get("base_optimizer_state", state.get("optimizer_state_dict"))["state"]
            partitions = "fp32_flat_groups" if "fp32_flat_groups" in state else "single_partition_of_fp32_groups"
            state[partitions] = [own[index][key] for index in range(len(state[partitions]))]
            torch.save(tree, copy / file)
        found[key] = {name: value.clone() for name, value in gather(str(copy)).items() if name in names}
        shutil.rmtree(copy)
    torch.save(found, out / "reference.pt")


if __name__ == "__main__":
    if sys.argv[1] == "reference":
        reference(Path(sys.argv[2]))
    elif sys.argv[1] == "join":
        join(Path(sys.argv[2]))
    else:
        (train_experts if "experts" in sys.argv else train)(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
