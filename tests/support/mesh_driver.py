"""Save checkpoints and run the mesh proof of many cases in one process group, under torchrun.

    torchrun --nproc-per-node N mesh_driver.py FOLDER

The first rank writes FOLDER/answers.json: the answers of each rank, by scenario.
"""

import json
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import mesh_cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptmove.verification.mesh import worker
from ckptmove.verification.place import Site
from ckptmove.verification.request import VerifyRequest
from ckptmove.verification.simulated.device import unavailable_reason

LAYOUTS = ("fsdp", "flat", "hsdp", "tp", "uneven", "ddp", "wrapped")
#: Checkpoint and case of each scenario.
SCENARIOS = {
    **{f"{name} to {name}": (name, name) for name in (*LAYOUTS, "frozen", "below_precision", *mesh_cases.OPTIMIZERS)},
    **{f"fsdp to {name}": ("fsdp", name) for name in ("hsdp", "tp", "ddp", "plain")},
    **{name: ("app", f"after_{name}") for name in mesh_cases.SPOILERS},
    **{
        name: ("fsdp", name)
        for name in (
            "average", "objects", "fewer", "more", "wider", "double", "frozen_later", "without_gradient", "not_finite",
            "ask_again", "fail", "three", "no_state", "dicts", "other_state", "flattened",
        )
    },
    "unread": ("unread", "unread"),
    "still": ("still", "still"),
    "weights": ("weights", "weights"),
    "schedule": ("schedule", "fsdp"),
    "truncated": ("truncated", "fsdp"),
    "file": ("file", "fsdp"),
    "below": ("below", "fsdp"),
}  # fmt: skip


def train(case):
    for _ in range(2):
        case.step(case.batch).backward()
        case.optimizer.step()
        case.optimizer.zero_grad()


def save(folder, name):
    if name == "file":
        if dist.get_rank() == 0:
            torch.save({"weight": torch.ones(2)}, folder / name)
        return
    case = mesh_cases.CASES["fsdp" if name in {"app", "schedule", "truncated", "below"} else name](torch.device("cpu"))
    train(case)
    made = {
        "wrapped": mesh_cases.indexed,
        "schedule": mesh_cases.with_rate_of_schedule,
        "weights": mesh_cases.of_model,
    }.get(name)
    state = (
        made(case.model, case.optimizer)
        if made
        else mesh_cases.state_of(case.model, case.optimizer, flat=name == "flat")
    )
    state = {"app": state} if name == "app" else state
    dcp.save(state, checkpoint_id=folder / name / ("inner" if name == "below" else ""))
    if name == "truncated" and dist.get_rank() == 0:
        for file in (folder / name).glob("*.distcp"):
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)
    dist.barrier()


def late(folder):
    """Run the proof with a rank that exceeds its deadline."""
    messages, reached = [], threading.Event()

    def wait(device):
        reached.set()
        while not messages:
            time.sleep(0.01)
        return mesh_cases.build("fsdp")

    mesh_cases.wait = wait
    worker.time = types.SimpleNamespace(time=time.time, sleep=lambda _: reached.wait())
    request = VerifyRequest(str(folder / "fsdp"), case="mesh_cases:wait", deadline=0.0, to="cpu")
    worker.answer(request, messages.append)
    return messages


def accelerated(folder):
    """Run the proof on a simulated device for each rank, without simulation, and without a case."""
    found = {}
    find = worker.find_site
    for name, site in (
        ("simulated", Site("cuda:0", "simulated", unavailable_reason() or "")),
        ("stray", Site("cuda:0", "simulated", unavailable_reason() or "")),
        ("too_old", Site("cuda:0", "simulated", "this torch is too old")),
    ):
        own = site._replace(target=f"cuda:{dist.get_rank()}")
        worker.find_site = lambda _, own=own: own
        messages = found[name] = []
        request = VerifyRequest(str(folder / "fsdp"), to=own.target, case=f"mesh_cases:{name}", devices=4)
        worker.answer(request, messages.append)
        dist.barrier()
    worker.find_site = lambda _: Site("cpu", "real")
    found["accelerator"] = []
    worker.answer(VerifyRequest(str(folder / "fsdp"), to="cpu"), found["accelerator"].append)
    dist.barrier()
    worker.find_site = find
    return found


def main(folder):
    dist.init_process_group("gloo")
    for name in dict.fromkeys(checkpoint for checkpoint, _ in SCENARIOS.values()):
        save(folder, name)
    found = {}
    for scenario, (checkpoint, case) in SCENARIOS.items():
        messages = found[scenario] = []
        request = VerifyRequest(str(folder / checkpoint), to="cpu", case=f"mesh_cases:{case}")
        worker.answer(request, messages.append)
        dist.barrier()
    found |= accelerated(folder)
    found["late"] = late(folder)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        answers = {scenario: [one[scenario] for one in gathered] for scenario in found}
        (folder / "answers.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
