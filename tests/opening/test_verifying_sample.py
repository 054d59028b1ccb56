"""``verify --sample`` of several files: files without a part of the sample are neither loaded nor reported."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ckptmove.checkpoint.pairing import pair_all
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.sampling import choose_sample


@pytest.fixture
def loads(monkeypatch):
    """The files that torch was asked to load."""
    load, seen = torch.load, []

    def watch(file, **options):
        seen.append(file if isinstance(file, str) else "a member")
        return load(file, **options)

    monkeypatch.setattr(torch, "load", watch)
    return seen


def chosen(path, count, seed=0):
    """The files that hold some of a sample, and all."""
    with open_checkpoint(str(path), Limits(), keep_trees=True) as checkpoint:
        inventory = checkpoint.inventory
        pairings = list(zip(inventory.optimizers, pair_all(inventory), strict=True))
        names = choose_sample(inventory, pairings, count, seed).names
        files = {part.name: {record.name for record in part.inventory.tensors} for part in checkpoint.parts}
    return {name for name, own in files.items() if own & names}, set(files)


def seed_without(path, file):
    """One with which a sample of one has nothing of a file."""
    return next(seed for seed in range(50) if file not in chosen(path, 1, seed)[0])


def test_files_with_nothing_of_the_sample_are_not_loaded(build, answers, loads):
    folder = build.hf_trainer(device="cpu", shards=4, ranks=3)
    wanted, files = chosen(folder, 1)
    found = answers(folder, sample=1)
    assert [found[name]["status"] for name in ("restore", "step", "parity", "fresh")] == ["passed"] * 4
    assert len(loads) == len(wanted) < len(files)
    assert {Path(path).name for path in loads} == wanted
    assert f"; not loaded: {len(files - wanted)} files " in found["restore"]["detail"]


def test_where_all_is_looked_at_every_file_is_loaded(build, answers, loads):
    folder = build.hf_trainer(device="cpu", shards=4)
    found = answers(folder, sample=100)
    assert {Path(path).name for path in loads} == chosen(folder, 100)[1]
    assert "not loaded" not in found["restore"]["detail"]


def test_members_with_nothing_of_the_sample_are_not_loaded(packer, answers, loads):
    members = packer.members() | {f"{index}.pth": packer.saved({"w": torch.ones(2)}) for index in range(5)}
    wanted, files = chosen(packer.pack(members), 1)
    found = answers(packer.pack(members), sample=1)
    assert found["restore"]["status"] == "passed"
    assert len(loads) == len(wanted) < len(files)


def test_nothing_is_said_of_a_file_that_was_not_loaded(packer, answers):
    members = packer.members() | {
        "args.pth": packer.saved({"w": torch.ones(2), "args": Namespace(a=1)}),
        "more.pth": packer.saved({"w": torch.ones(2)}),
    }
    folder = packer.unpack(members)
    without = seed_without(folder, "args.pth")
    looking = next(seed for seed in range(50) if "args.pth" in chosen(folder, 1, seed)[0])
    found = answers(folder, sample=1, seed=without)["restore"]
    assert "args.pth" not in found["detail"]
    assert found["evidence"]["weights_only"] is True
    found = answers(folder, sample=1, seed=looking)["restore"]
    assert ": args.pth (" in found["detail"]


def test_what_is_refused_lies_whole_as_far_as_it_was_looked_at(packer, answers):
    tree = {"args": Namespace(a=1), **{f"w{index}": torch.ones(2) for index in range(9)}}
    folder = packer.unpack({"a.pth": packer.saved(tree)})
    found = answers(folder, sample=2)["restore"]
    assert found["detail"].startswith("2 tensors ")


def plain(packer, **more):
    """A model, and an optimizer whose only tensor is its learning rate, with the seed of a sample without that."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    members = {
        "model.pth": packer.saved({"state_dict": model.state_dict(), **more}),
        "optimizer.pth": packer.saved(optimizer.state_dict()),
        **{f"{index}.pth": packer.saved({"w": torch.ones(2)}) for index in range(3)},
    }
    folder = packer.unpack(members)
    return folder, seed_without(folder, "optimizer.pth")


def test_an_option_in_a_file_that_was_not_loaded_is_read(packer, answers, loads):
    folder, seed = plain(packer)
    found = answers(folder, sample=1, seed=seed)
    assert [found[name]["status"] for name in ("restore", "step", "parity")] == ["passed"] * 3, found
    assert found["parity"]["detail"].startswith("equal bit for bit to the same step from what torch.load returns")
    assert "optimizer.pth" not in {Path(path).name for path in loads}


def test_no_step_is_said_to_be_from_a_file_that_was_not_loaded(packer, answers):
    folder, seed = plain(packer, args=Namespace(a=1))
    parity = answers(folder, sample=1, seed=seed)["parity"]["detail"]
    assert "because torch.load refuses these files" in parity


def test_no_library_is_said_to_have_returned_what_was_not_loaded(packer, answers):
    table = safetensors.torch.save({"w": torch.ones(2)})
    folder = packer.unpack({"a.pth": packer.saved({"w": torch.ones(2)}), "b.safetensors": table})
    found = answers(folder, sample=2)["restore"]["detail"]
    assert all(library in found for library in ("torch.load", "safetensors"))
    found = answers(folder, sample=1, seed=seed_without(folder, "b.safetensors"))["restore"]["detail"]
    assert "safetensors" not in found
    assert "; not loaded: 1 file " in found
