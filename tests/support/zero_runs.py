"""Checkpoints of DeepSpeed ZeRO: real ones, and small ones that a test can change."""

from __future__ import annotations

import shutil
from math import ceil, prod
from pathlib import Path

import torch

#: Made by ``deepspeed_runs/make.py``.
REAL = sorted(path.stem for path in (Path(__file__).parent / "deepspeed_runs").glob("*.zip"))
SHAPES = ({"a": (3, 5), "b": (7,)}, {"c": (), "d": (2, 2)})


def real(name, folder):
    """Unpack a real checkpoint; return its folder, and DeepSpeed's own conversion or None."""
    shutil.unpack_archive(Path(__file__).parent / "deepspeed_runs" / f"{name}.zip", folder)
    path = folder / "reference.pt"
    reference = torch.load(path) if path.exists() else None
    path.unlink(missing_ok=True)
    return folder, reference


def whole(seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) for group in shapes for name, shape in group.items()}


def partitions(values, shapes, ranks, stage):
    """The partition of each rank of one group, with its padding."""
    if not shapes:
        return [torch.zeros(0)] * ranks
    if stage < 3:
        flat = torch.cat([values[name].flatten() for name in shapes])
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % (2 * ranks)))
        return list(flat.chunk(ranks))
    cut = []
    for name, shape in shapes.items():
        each = ceil(prod(shape) / ranks)
        cut.append(torch.nn.functional.pad(values[name].flatten(), (0, each * ranks - prod(shape))).chunk(ranks))
    return [torch.cat(own) for own in zip(*cut, strict=True)]


def made(folder, stage=2, ranks=2, shapes=SHAPES, change=None):
    """Save a run as DeepSpeed does, without its classes.

    ``change(name, tree)`` changes a tree before it is saved.
    """
    weights, first, second = whole(0, shapes), whole(1, shapes), whole(2, shapes)
    first = {name: value * 1e-3 for name, value in first.items()}
    parts = [[partitions(each, group, ranks, stage) for group in shapes] for each in (weights, first, second)]
    folder.mkdir(parents=True, exist_ok=True)
    trees = {}
    options = dict(torch.optim.AdamW([torch.zeros(1)]).param_groups[0])
    for rank in range(ranks):
        own = [[group[rank].clone() for group in each] for each in parts]
        state = {
            index: {"step": torch.tensor(2.0), "exp_avg": one, "exp_avg_sq": two}
            for index, (one, two) in enumerate(zip(own[1], own[2], strict=True))
        }
        groups = [{**options, "params": [index]} for index in range(len(shapes))]
        inner = {"state": state, "param_groups": groups}
        tree = {"partition_count": ranks, "zero_stage": stage}
        if stage == 3:
            tree |= {"optimizer_state_dict": inner, "fp32_flat_groups": own[0]}
        else:
            paddings = [sum(len(one) for one in group) - sum(map(prod, shape.values())) for group, shape in
                        zip(parts[0], shapes, strict=True)] if rank == ranks - 1 else [0] * len(shapes)  # fmt: skip
            lean = [one[: len(one) - cut] for one, cut in zip(own[0], paddings, strict=True)]
            tree |= {"base_optimizer_state": inner, "single_partition_of_fp32_groups": lean}
            tree |= {"partition_count": [ranks] * len(shapes), "group_paddings": paddings}
        trees[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": tree}
        if stage == 3 or not rank:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            trees[name] = {
                "module": {key: torch.zeros(0) if stage == 3 else value for key, value in weights.items()},
                "param_shapes": [{key: torch.Size(shape) for key, shape in group.items()} for group in shapes],
                "shared_params": {}, "global_steps": 2, "ds_version": "0.15", "optimizer": None,
                "dp_world_size": ranks, "mp_world_size": 1,
            }  # fmt: skip
    for name, tree in trees.items():
        if change is not None:
            change(name, tree)
        torch.save(tree, folder / name)
    return folder
