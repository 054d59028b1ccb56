"""The sample directories, as trainers write them."""

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
    """A directory. `build` returns its files by name: objects to save, or text. Its docstring is the description."""

    name: str
    layout: str
    wrong: str | None
    findings: tuple[str, ...]
    build: Callable[[], dict[str, object]]


DIRECTORIES: list[Directory] = []


def directory(
    name: str, layout: str, *findings: str, wrong: str | None = None
) -> Callable[[Callable[[], dict[str, object]]], Callable[[], dict[str, object]]]:
    """Add a directory to the list, with the findings to expect without a target."""

    def enter(build: Callable[[], dict[str, object]]) -> Callable[[], dict[str, object]]:
        DIRECTORIES.append(Directory(name=name, layout=layout, wrong=wrong, findings=findings, build=build))
        return build

    return enter


@directory("hf-trainer-cuda3", "hf-trainer", "D103")
def hf_trainer_cuda3() -> dict[str, object]:
    """A step of the HF Trainer on the fourth GPU: one file each for weights, AdamW, scheduler and RNG states."""
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
