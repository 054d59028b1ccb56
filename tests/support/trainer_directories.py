"""Tiny checkpoint directories of trainers, with tags of absent devices."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import save_on_ranks
import simulation
import torch
import untraced
from answers import checks_of

from ckptmove.proof.request import VerifyRequest
from ckptmove.training.worker import run

skip_what_this_torch_cannot_simulate = simulation.skip_what_this_torch_cannot_simulate
PLACED: dict[int, tuple[object, str]] = {}


def tag(storage):
    """Return tags like torch's taggers: a new string each time for a device with an index."""
    _, device = PLACED.get(storage.data_ptr(), (None, "cpu"))
    kind, _, index = device.partition(":")
    return None if device == "cpu" else kind + ":" + str(int(index))


# torch sorts packages by number and then by function, which cannot be compared: no other test may use this number.
torch.serialization.register_package(3, tag, lambda storage, location: None)


def tensors_of(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_of(value, f"{path}.{key}" if path else str(key))


def save(path, tree, device="cpu", stay=("step", "cpu"), **options):
    """Save a tree with the tag of a device, except tensors whose last name is in ``stay``."""
    PLACED.clear()
    for name, tensor in tensors_of(tree):
        if name.rpartition(".")[2] not in stay:
            PLACED[tensor.untyped_storage().data_ptr()] = (tensor, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tree, path, **options)
    PLACED.clear()


def trained():
    """A model and its AdamW after two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer


def random_states():
    return {"python": random.Random(0).getstate(), "numpy": ("MT19937", [1, 2]), "cpu": torch.get_rng_state()}


class Builder:
    """Makes directories below one folder."""

    def __init__(self, root):
        self.root = root
        self.save = save
        self.trained = trained

    def hf_trainer(self, name="checkpoint-2", device="cuda:0", *, ranks=1, shards=1):
        folder = self.root / name
        model, optimizer = trained()
        weights = list(model.state_dict().items())
        if shards == 1:
            save(folder / "pytorch_model.bin", dict(weights), device)
        else:
            self._shards(folder, weights, shards, device)
        save(folder / "optimizer.pt", optimizer.state_dict(), device)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        save(folder / "scheduler.pt", schedule.state_dict())
        for rank in range(ranks):
            suffix = f"_{rank}" if ranks > 1 else ""
            save(folder / f"rng_state{suffix}.pth", random_states())
        save(folder / "training_args.bin", {"device": torch.device(device), "seed": 1})
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
        (folder / "vocab.txt").write_text("a\nb\n")
        return folder

    def accelerate(self, name="save_state", device="cuda:0"):
        folder = self.root / name
        model, optimizer = trained()
        save(folder / "pytorch_model.bin", model.state_dict(), device)
        save(folder / "optimizer.bin", optimizer.state_dict(), device)
        states = {"random_state": (3,), "numpy_random_seed": (4,), "torch_manual_seed": torch.get_rng_state()}
        save(folder / "random_states_0.pkl", states)
        scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "_growth_tracker": 0}
        save(folder / "scaler.pt", scaler)
        return folder

    def deepspeed(self, name="run", ranks=2):
        folder = self.root / name
        for rank in range(ranks):
            model, optimizer = trained()
            step = folder / "global_step2"
            state = {"module": model.state_dict(), "global_steps": 2, "ds_config": {}, "ds_version": "0.14.0"}
            save(step / f"mp_rank_{rank:02}_model_states.pt", state, f"cuda:{rank}")
            save(
                step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
                {"optimizer_state_dict": optimizer.state_dict(), "ds_version": "0.14.0"},
                f"cuda:{rank}",
            )
        (folder / "latest").write_text("global_step2")
        return folder

    def megatron(self, name="megatron"):
        folder = self.root / name
        model, optimizer = trained()
        tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 10}
        save(folder / "iter_0000010" / "mp_rank_00" / "model_optim_rng.pt", tree, "cuda:0")
        (folder / "latest_checkpointed_iteration.txt").write_text("10")
        return folder

    def pointed(self, tree, pointer="/gone/work_dir/epoch_2.pth"):
        folder = self.root / "work_dir"
        save(folder / "epoch_2.pth", tree)
        (folder / "last_checkpoint").write_text(pointer)
        return folder

    def sharded(self, name="sharded", device="cuda:0", shards=2):
        folder = self.root / name
        self._shards(folder, list(trained()[0].state_dict().items()), shards, device)
        (folder / "config.json").write_text("{}")
        return folder

    def _shards(self, folder, weights, count, device):
        weight_map = {}
        for index in range(count):
            shard = f"pytorch_model-{index + 1:05}-of-{count:05}.bin"
            size = len(weights) // count
            part = dict(weights[index * size : (index + 1) * size])
            save(folder / shard, part, device)
            weight_map |= dict.fromkeys(part, shard)
        index = {"metadata": {"total_size": 92}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


class Packer:
    """Makes archives of the files of a run."""

    def __init__(self, root, build):
        self.root, self.build = root, build

    def members(self, device="cpu", **options):
        """The members of an archive of stable-baselines3."""
        model, optimizer = self.build.trained()
        return {
            "data": json.dumps({"policy_class": "MlpPolicy"}).encode(),
            "policy.pth": self.saved(model.state_dict(), device, **options),
            "policy.optimizer.pth": self.saved(optimizer.state_dict(), device, **options),
        }

    def saved(self, value, device="cpu", **options):
        self.build.save(self.root / "member", value, device, **options)
        data = (self.root / "member").read_bytes()
        (self.root / "member").unlink()
        return data

    def pack(self, members, kind="zip", name="model"):
        path = self.root / f"{name}.{kind}"
        if kind == "tar":
            with tarfile.open(path, "w") as archive:
                for member, data in members.items():
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
            return path
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED) as archive:
            for member, data in members.items():
                archive.writestr(member, data)
        return path

    def unpack(self, members, name="unpacked"):
        for member, data in members.items():
            path = self.root / name / member
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self.root / name


@pytest.fixture
def build(tmp_path):
    return Builder(tmp_path)


@pytest.fixture
def packer(tmp_path, build):
    return Packer(tmp_path, build)


@pytest.fixture
def snapshot():
    """The content of a directory: the bytes of each file, the target of each link, and each folder."""

    def take(folder):
        found = {}
        for path in sorted(Path(folder).rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_symlink():
                found[name] = f"-> {path.readlink()}"
            else:
                found[name] = path.read_bytes() if path.is_file() else None
        return found

    return take


@pytest.fixture
def answers():
    """Run the checks of the worker in this process; return them by name."""

    def ask(path, to="cpu", **options):
        messages = []
        run(VerifyRequest(path=str(path), to=to, **options), messages.append)
        return checks_of(messages)

    return ask


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The files of four ranks, and the results of ``full_tensor``."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**untraced.environment(), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, save_on_ranks.__file__, str(folder)], check=True, capture_output=True, env=environment
    )
    return folder
