"""Save checkpoints and run the mesh proof of many cases in one process group, of two or four forked processes.

    mesh_driver.py FOLDER RANKS [SCENARIO]...

torch is imported once, before the ranks are forked. The first rank writes FOLDER/answers.json: the answers of each
rank, by scenario.
"""

import json
import sys
import threading
import time
import types
import warnings
from pathlib import Path

import forked_ranks
import mesh_cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ckptmove.proof.place import Site
from ckptmove.proof.request import VerifyRequest
from ckptmove.simulation.device import unavailable_reason
from ckptmove.training.mesh import worker

LAYOUTS = ("fsdp", "hsdp", "tp", "uneven", "ddp", "stages", "interleaved", "fsdp1")
#: Layouts that are on four ranks what they are on two.
MORE_LAYOUTS = ("flat", "wrapped", "fsdp1_whole", "flattened", "flattened_whole", "two_models")
#: Checkpoint and case of each scenario in which four ranks are not like two.
ON_FOUR_RANKS = {
    **{f"{name} to {name}": (name, name) for name in LAYOUTS},
    **{f"fsdp to {name}": ("fsdp", name) for name in ("hsdp", "tp", "ddp", "plain")},
    "swap": ("app", "after_swap"),
    "truncated": ("truncated", "fsdp"),
    "stages_lists": ("stages_lists", "stages_lists"),
}
#: Those of the scenarios on two ranks.
ON_TWO_RANKS = {
    **{f"{name} to {name}": (name, name) for name in (*MORE_LAYOUTS, "fsdp", "frozen", "below_precision")},
    **{f"{name} to {name}": (name, name) for name in mesh_cases.OPTIMIZERS},
    **{f"fsdp to {name}": ("fsdp", name) for name in ("flattened", "whole_tensors")},
    **{name: ("app", f"after_{name}") for name in mesh_cases.SPOILERS if name != "swap"},
    **{
        name: ("fsdp", name)
        for name in (
            "average", "objects", "fewer", "more", "wider", "double", "frozen_later", "without_gradient", "not_finite",
            "ask_again", "fail", "output", "three", "no_state", "shared_optimizer", "other_state",
        )
    },
    **{name: (name, "fsdp") for name in mesh_cases.DAMAGES},
    **{f"flattened to {name}": ("flattened", name) for name in ("fsdp", "type_sharded", "type_full")},
    "type_local": ("flattened", "type_local"),
    "after_flat_swap": ("app", "after_flat_swap"),
    "unread": ("unread", "unread"),
    "still": ("still", "still"),
    "weights": ("weights", "weights"),
    "schedule": ("schedule", "fsdp"),
    **{f"fsdp to {name}": ("fsdp", name) for name in ("no_loss", "float_loss")},
    "one_file to fsdp": ("one_file", "fsdp"),
    "one_file to wider": ("one_file", "wider"),
    "numbered to fsdp": ("numbered", "fsdp"),
    "fsdp1 to fsdp": ("fsdp1", "fsdp"),
    "below to fsdp": ("below", "fsdp"),
    "accelerate to accelerate": ("accelerate", "accelerate"),
    "of_ranks to by_index": ("of_ranks", "by_index"),
    "indexed_plain to indexed_plain": ("indexed_plain", "indexed_plain"),
    "safetensors to weights_only": ("safetensors", "weights_only"),
    "consolidated to weights_only": ("consolidated", "weights_only"),
    "consolidated to average": ("consolidated", "average"),
    "tied_shards to tied_weights": ("tied_shards", "tied_weights"),
    **{f"tied_left_out to {name}": ("tied_left_out", name) for name in ("tied", "tied_fsdp1")},
    "twice": ("twice", "weights_only"),
    "namespace": ("namespace", "fsdp"),
    "other_kinds": ("other_kinds", "fsdp"),
    "file": ("file", "fsdp"),
    "no_dict": ("no_dict", "fsdp"),
}  # fmt: skip


def train(case):
    for _ in range(2):
        loss = case.step(case.batch)
        if loss is not None and loss.requires_grad:
            loss.backward()
        for optimizer in mesh_cases.optimizers_of(case):
            optimizer.step()
            optimizer.zero_grad()


FILES = {
    "file": {"model": {"weight": torch.ones(2)}},
    "no_dict": [1.0],
    "namespace": {"args": types.SimpleNamespace(lr=0.1)},
}


def full_state(case):
    options = StateDictOptions(full_state_dict=True)
    return dict(zip(("model", "optim"), get_state_dict(case.model, case.optimizer, options=options), strict=True))


def save_one_file(path, case):
    full = full_state(case)
    if path.name == "other_kinds":
        full["model"]["seen"] = 1.0
        full["optim"]["param_groups"][0]["lr"] = torch.ones(())
    if dist.get_rank() == 0:
        torch.save(full, path)


def save_numbered(path, case):
    """Save as a script of one process, which numbers the optimizer's parameters."""
    own = mesh_cases.build("plain")
    full = full_state(case)
    set_state_dict(own.model, own.optimizer, model_state_dict=full["model"], optim_state_dict=full["optim"])
    if dist.get_rank() == 0:
        torch.save({"model": own.model.state_dict(), "optim": own.optimizer.state_dict()}, path)


def save_as_accelerate(path, case):
    for (key, value), part in zip(
        mesh_cases.of_accelerate(case.model, case.optimizer).items(), ("fsdp_0", "optimizer_0"), strict=True
    ):
        dcp.save({key: value}, checkpoint_id=path / part)
    torch.save({"torch_manual_seed": torch.get_rng_state()}, path / f"random_states_{dist.get_rank()}.pkl")


def save_by_rank(path, case):
    path.mkdir(exist_ok=True)
    for name, one in (("model", case.model), ("optim", case.optimizer)):
        torch.save(one.state_dict(), path / f"{name}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")


def save_twice(path, case):
    path.mkdir(exist_ok=True)
    full = full_state(case)["model"]
    for number in (1, 2) if dist.get_rank() == 0 else ():
        torch.save(full, path / f"{number}.pt")


def without_tied(weights):
    """A state_dict without the second name of a parameter, as Hugging Face's ``save_pretrained`` writes it."""
    return {name: one for name, one in weights.items() if name != "head.weight"}


def save_without_tied(path, case):
    state = mesh_cases.state_of(case.model, case.optimizer)
    dcp.save({**state, "model": without_tied(state["model"])}, checkpoint_id=path)


def save_safetensors(path, case):
    weights = mesh_cases.of_weights(case.model, case.optimizer)["model"]
    weights = without_tied(weights) if path.name == "tied_shards" else weights
    places = {name: 1 + number % 2 for number, name in enumerate(weights)}
    is_whole = path.name == "consolidated"
    dcp.save(
        weights,
        storage_writer=dcp.HuggingFaceStorageWriter(
            str(path), places, save_distributed=True, enable_consolidation=is_whole
        ),
    )


#: How to save a trained case in files that ``torch.distributed.checkpoint.load`` does not read, by all ranks.
SAVES = {
    "one_file": save_one_file,
    "numbered": save_numbered,
    "other_kinds": save_one_file,
    "accelerate": save_as_accelerate,
    "of_ranks": save_by_rank,
    "twice": save_twice,
    "safetensors": save_safetensors,
    "tied_shards": save_safetensors,
    "tied_left_out": save_without_tied,
    "consolidated": save_safetensors,
}


def save(folder, name):
    if name in FILES:
        if dist.get_rank() == 0:
            torch.save(FILES[name], folder / name)
        return
    if name in SAVES:
        case = mesh_cases.build("fsdp", tied=name.startswith("tied_"))
        train(case)
        SAVES[name](folder / name, case)
        dist.barrier()
        return
    is_plain = name in {"app", "schedule", "truncated", "below", *mesh_cases.DAMAGES}
    case = mesh_cases.CASES["fsdp" if is_plain else name](torch.device("cpu"))
    train(case)
    if name in mesh_cases.DAMAGES:
        mesh_cases.DAMAGES[name](case.model, case.optimizer)
    made = {
        "wrapped": mesh_cases.indexed,
        "indexed_plain": mesh_cases.indexed,
        "schedule": mesh_cases.with_rate_of_schedule,
        "weights": mesh_cases.of_model,
    }.get(name)
    state = case.state
    if made:
        state = made(case.model, case.optimizer)
    elif not isinstance(case.model, dict):
        state = mesh_cases.state_of(case.model, case.optimizer, flat=name in {"flat", "stages"})
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
        ("required", Site("cuda:0", "simulated", unavailable_reason() or "")),
        ("required_too_old", Site("cuda:0", "simulated", "this torch is too old")),
    ):
        own = site._replace(target=f"cuda:{dist.get_rank()}")
        worker.find_site = lambda _, own=own: own
        messages = found[name] = []
        is_required = name.startswith("required")
        case = f"mesh_cases:{'simulated' if is_required else name}"
        request = VerifyRequest(
            str(folder / "fsdp"), to=own.target, case=case, devices=dist.get_world_size(), require_device=is_required
        )
        worker.answer(request, messages.append)
        dist.barrier()
    worker.find_site = lambda _: Site("cpu", "real")
    found["accelerator"] = []
    worker.answer(VerifyRequest(str(folder / "fsdp"), to="cpu"), found["accelerator"].append)
    dist.barrier()
    worker.find_site = find
    return found


def main(folder):
    scenarios = ON_FOUR_RANKS if dist.get_world_size() == 4 else ON_TWO_RANKS
    scenarios = {name: scenarios[name] for name in sys.argv[3:] or scenarios}
    for name in dict.fromkeys(checkpoint for checkpoint, _ in scenarios.values()):
        save(folder, name)
    found = {}
    for scenario, (checkpoint, case) in scenarios.items():
        messages = found[scenario] = []
        request = VerifyRequest(str(folder / checkpoint), to="cpu", case=f"mesh_cases:{case}")
        worker.answer(request, messages.append)
        dist.barrier()
    if scenarios == ON_TWO_RANKS:
        found |= accelerated(folder)
        found["late"] = late(folder)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        answers = {scenario: [[said.line() for said in one[scenario]] for one in gathered] for scenario in found}
        (folder / "answers.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(forked_ranks.run(main, Path(sys.argv[1]), int(sys.argv[2])))
