"""The sample directories: what a trainer leaves in a folder.

Never trains: the steps are those of `training`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement import place
from training import adamw, rng_states, train

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """One directory: `build` returns its files by name, objects to save and texts; its docstring says what it holds."""

    name: str
    layout: str
    wrong: str | None
    findings: tuple[str, ...]
    build: Callable[[], dict[str, object]]


DIRECTORIES: list[Directory] = []


def directory(
    name: str, layout: str, *findings: str, wrong: str | None = None
) -> Callable[[Callable[[], dict[str, object]]], Callable[[], dict[str, object]]]:
    """Enter a builder in the list, with the findings that are expected when no target is given."""

    def enter(build: Callable[[], dict[str, object]]) -> Callable[[], dict[str, object]]:
        DIRECTORIES.append(Directory(name=name, layout=layout, wrong=wrong, findings=findings, build=build))
        return build

    return enter


@directory("hf-trainer-cuda3", "hf-trainer", "D103")
def hf_trainer_cuda3() -> dict[str, object]:
    """What the HF Trainer keeps of a step on the fourth GPU: weights, AdamW, scheduler, RNG states, a file each."""
    run = train(adamw, seed=31)
    return {
        "pytorch_model.bin": place(run.weights(), "cuda:3"),
        "optimizer.pt": place(run.state(), "cuda:3"),
        "scheduler.pt": run.scheduler.state_dict(),
        "rng_state.pth": rng_states(31),
        "trainer_state.json": json.dumps({"global_step": 3, "epoch": 1.0}),
    }


@directory(
    "sharded-two-gpus",
    "sharded",
    "D101",
    "D103",
    wrong="the first shard is on cuda:0, the second on cuda:1",
)
def sharded_two_gpus() -> dict[str, object]:
    """A model in two shards with an index of their tensors."""
    weights = train(adamw, seed=32).weights()
    names = list(weights)
    shards = {
        f"pytorch_model-{number + 1:05}-of-00002.bin": {name: weights[name] for name in names[2 * number :][:2]}
        for number in range(2)
    }
    for device, shard in zip(("cuda:0", "cuda:1"), shards.values(), strict=True):
        place(shard, device)
    index = {
        "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
    return {**shards, "pytorch_model.bin.index.json": json.dumps(index, indent=2) + "\n"}
