"""A directory is read as one checkpoint: the content of its files, under their paths."""

from __future__ import annotations

import argparse
import pickle
import random
import shlex
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptmove
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.errors import AccessFailed, DamagedArchive, EmptyDirectory, LimitExceeded, NotACheckpoint
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint


def read(folder):
    return ckptmove.inspect(folder).inventory


def alone(path):
    with open_checkpoint(str(path)) as checkpoint:
        return checkpoint.inventory


def codes(folder, **options):
    return {finding.code for finding in ckptmove.inspect(folder, **options).findings}


# --- names, storages and sums -----------------------------------------------------------------------------------------


def test_tensors_are_those_of_the_files_under_their_paths(build):
    folder = build.deepspeed()
    merged = read(folder)
    expected = [
        (f"{one.path}.{tensor.name}", tensor.device, tensor.dtype, tensor.shape, f"{one.path}/{tensor.storage}")
        for one in merged.files
        for tensor in alone(folder / one.path).tensors
    ]
    assert [(t.name, t.device, t.dtype, t.shape, t.storage) for t in merged.tensors] == expected
    assert "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt.optimizer_state_dict.state.0.exp_avg" in {
        tensor.name for tensor in merged.tensors
    }
    assert len({storage.key for storage in merged.storages}) == len(merged.storages)
    assert {tensor.storage for tensor in merged.tensors} == {storage.key for storage in merged.storages}


def test_the_size_is_that_of_all_files(build):
    folder = build.hf_trainer()
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_bytes(b"123")
    assert read(folder).size_bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_tensor_that_is_a_whole_file_has_its_name(build, tmp_path):
    build.save(tmp_path / "d" / "mean.pt", torch.ones(2))
    torch.save(torch.ones(2).to_sparse(), tmp_path / "d" / "sparse.pt")
    mean, sparse = read(tmp_path / "d").tensors
    assert (mean.name, sparse.name) == ("mean.pt", "sparse.pt")
    assert [part.name for part in sparse.parts] == ["sparse.pt.indices", "sparse.pt.values"]


def test_sites_do_not_meet(build):
    merged = read(build.hf_trainer())
    sites = [site for storage in merged.storages for site in storage.tag_sites]
    sites += [flag.site for optimizer in merged.optimizers for group in optimizer.groups for flag in group.flags]
    sites += [mention.site for mention in merged.mentions]
    assert len(set(sites)) == len(sites)


def test_facts_are_about_the_storages_of_the_directory(build, tmp_path):
    folder = build.sharded()
    path = folder / "pytorch_model-00002-of-00002.bin"
    with open_checkpoint(str(path)) as checkpoint:
        span = checkpoint.file.span("1")
    data = bytearray(path.read_bytes())
    data[span.start] ^= 1
    path.write_bytes(data)
    assert codes(folder) == set()
    (finding,) = ckptmove.inspect(folder, check=True).findings
    assert finding.code == "F801"
    assert finding.where == ("pytorch_model-00002-of-00002.bin.1.bias",)
    (fact,) = ckptmove.inspect(folder, check=True).inventory.facts
    assert fact.record == "pytorch_model-00002-of-00002.bin/pytorch_model-00002-of-00002/data/1"
    assert fact.storage_key == "pytorch_model-00002-of-00002.bin/1"


def test_a_check_tells_how_far_it_is_over_all_files(build):
    folder = build.hf_trainer()
    seen = []
    ckptmove.inspect(folder, check=True, progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {read(folder).size_bytes}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_what_every_file_says_is_said_once(build):
    merged = read(build.deepspeed())
    assert len({use.name for use in merged.globals}) == len(merged.globals)
    assert merged.producer == "deepspeed 0.14.0"


# --- roles ------------------------------------------------------------------------------------------------------------


def roles_of(folder):
    return {one.path: ", ".join(one.roles) for one in read(folder).files}


def test_each_file_has_its_roles(build):
    assert roles_of(build.hf_trainer("a", ranks=2)) == {
        "optimizer.pt": "optimizer",
        "pytorch_model.bin": "model",
        "rng_state_0.pth": "rng",
        "rng_state_1.pth": "rng",
        "scheduler.pt": "scheduler",
        "training_args.bin": "other",
    }
    assert roles_of(build.accelerate("b")) == {
        "optimizer.bin": "optimizer",
        "pytorch_model.bin": "model",
        "random_states_0.pkl": "rng",
        "scaler.pt": "scaler",
    }
    assert set(roles_of(build.deepspeed("c")).values()) == {"model", "optimizer"}
    assert set(roles_of(build.megatron("d")).values()) == {"model, optimizer"}


def test_an_optimizer_without_state_is_one(build, tmp_path):
    _, optimizer = build.trained()
    build.save(tmp_path / "d" / "a.pt", optimizer.state_dict() | {"state": {}})
    assert roles_of(tmp_path / "d") == {"a.pt": "optimizer"}


def test_where_the_content_says_nothing_the_place_does(build, tmp_path):
    folder = tmp_path / "d"
    build.save(folder / "pytorch_model.bin", {"scale": torch.ones(1), "notes": ["a", "b", "c"]})
    build.save(folder / "optimizer.bin", {"exp_avg.0": torch.ones(1), "exp_avg.1": torch.ones(1)})
    build.save(folder / "scheduler.bin", {"mine": torch.ones(1)})
    build.save(folder / "rng_state.pth", {"cuda": torch.zeros(16, dtype=torch.uint8), "seed": torch.tensor(1)})
    build.save(folder / "model_ema.pt", {"0.weight": torch.ones(1), "0.bias": torch.ones(1), "decay": 0.9})
    merged = read(folder)
    assert {tensor.name: tensor.role for tensor in merged.tensors} == {
        "model_ema.pt.0.weight": "ema",
        "model_ema.pt.0.bias": "ema",
        "optimizer.bin.exp_avg.0": "optimizer",
        "optimizer.bin.exp_avg.1": "optimizer",
        "pytorch_model.bin.scale": "model",
        "rng_state.pth.cuda": "rng",
        "rng_state.pth.seed": "other",
        "scheduler.bin.mine": "scheduler",
    }
    assert {"scheduler", "rng"} <= merged.contents


def test_a_copy_of_a_model_does_not_make_a_model_of_what_else_is_in_its_file(build, tmp_path):
    build.save(tmp_path / "d" / "ema.pt", {"numbers": torch.ones(1)})
    assert [tensor.role for tensor in read(tmp_path / "d").tensors] == ["other"]


# --- findings over several files --------------------------------------------------------------------------------------


def test_a_whole_run_has_all_that_a_resume_needs(build):
    assert codes(build.hf_trainer()) == set()


def test_parameters_are_found_in_another_file(build):
    for folder in (build.hf_trainer("a"), build.hf_trainer("b", shards=2), build.accelerate("c")):
        (pairing,) = pair_all(read(folder))
        assert pairing.how == "order"
        names = [tensor.name.partition(".bin.")[2] for _, tensor in pairing.matches]
        assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_keys_of_a_files_root_are_none_of_the_model(build):
    folder = build.deepspeed()
    assert "K601" not in codes(folder)
    assert "global_step2/mp_rank_00_model_states.pt.module" in read(folder).root_keys


def test_optimizers_find_the_model_of_their_own_file(build, tmp_path):
    for number in range(2):
        model, optimizer = build.trained()
        tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        build.save(tmp_path / "d" / f"epoch_{number}.pth", tree)
    for number, pairing in enumerate(pair_all(read(tmp_path / "d"))):
        assert pairing.how == "order"
        assert pairing.matches[0][1].name == f"epoch_{number}.pth.model.0.weight"


def test_a_moment_on_another_device_than_a_parameter_in_another_file(build):
    folder = build.hf_trainer(device="cuda:1")
    _, optimizer = build.trained()
    build.save(folder / "optimizer.pt", optimizer.state_dict(), "cuda:0")
    (finding,) = [one for one in ckptmove.inspect(folder, device_count=2).findings if one.code == "D102"]
    assert finding.where[0] == "optimizer.pt.state.0.exp_avg"


def test_keys_of_text_are_mended_as_the_fix_says(build, tmp_path):
    """``dcp_to_torch`` makes text of every key; the state gets the keys of the groups, whichever are text."""
    model, optimizer = build.trained()
    keys = [*optimizer.state_dict()["state"]]
    for text_in in ("state", "groups"):
        state = optimizer.state_dict()
        if text_in == "state":
            state["state"] = {str(key): value for key, value in state["state"].items()}
        else:
            state["param_groups"][0]["params"] = [str(key) for key in state["param_groups"][0]["params"]]
        torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "a.pt")
        (finding,) = [one for one in ckptmove.inspect(tmp_path / "a.pt").findings if one.code == "O206"]
        assert "the keys in the state of optimizer" in finding.fix
        listed = {str(key): key for key in state["param_groups"][0]["params"]}
        state["state"] = {listed[str(key)]: value for key, value in state["state"].items()}
        optimizer.load_state_dict(state)
        assert len(optimizer.state) == len(keys)


def test_each_rank_of_zero_has_moments_of_its_own_share(build):
    folder = build.deepspeed()
    (folder / "global_step2" / "mp_rank_01_model_states.pt").unlink()  # the model is saved once, by the first
    found = ckptmove.inspect(folder, device_count=2).findings
    assert "D102" not in {one.code for one in found}


def test_what_is_expected_of_a_directory(build):
    folder = build.hf_trainer()
    assert ckptmove.inspect(folder, expect="cuda:0").plan.edits == ()
    plan = ckptmove.inspect(folder, expect="cpu").plan
    assert {name.partition(".")[0] for edit in plan.edits for name in edit.names} == {"pytorch_model", "optimizer"}


# --- other files ------------------------------------------------------------------------------------------------------


def test_a_directory_without_a_checkpoint(build, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text("{}")
    (tmp_path / "d" / "data.bin").write_bytes(bytes(range(200)))
    with pytest.raises(EmptyDirectory) as caught:
        read(tmp_path / "d")
    assert (caught.value.files, caught.value.form) == (2, None)
    assert caught.value.path == str(tmp_path / "d")


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "pytorch_model.bin", "epoch_2.pth", "last.ckpt", "random_states_0.pkl"]
)
@pytest.mark.parametrize(
    "content",
    [b"", bytes(64), b"<!DOCTYPE html><html>", b"version https://git-lfs.github.com/spec/v1\n", b"\x01\x02\xff"],
)
def test_what_must_have_been_a_checkpoint_is_not_passed_over(build, tmp_path, name, content):
    folder = tmp_path / "d"
    build.save(folder / "other.pt", {"0.weight": torch.ones(1)})
    (folder / name).write_bytes(content)
    with pytest.raises(NotACheckpoint) as caught:
        read(folder)
    assert caught.value.path == str(folder / name)


def test_other_files_are_passed_over(build, tmp_path):
    folder = tmp_path / "d"
    build.save(folder / "last.ckpt", {"0.weight": torch.ones(1)})
    (folder / "__init__.py").touch()
    (folder / "events.out.tfevents.1").write_bytes(b"\x18\0\0\0\0\0\0\0\xa3\x7f")
    (folder / "data.bin").write_bytes(b"\x01\x02\xff")
    (folder / "counter.ckpt").write_text("12")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.pt").write_bytes(b"PK\x03\x04")
    assert [one.path for one in read(folder).files] == ["last.ckpt"]


def test_a_damaged_file_is_named(build):
    folder = build.hf_trainer()
    path = folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DamagedArchive) as caught:
        read(folder)
    assert caught.value.path == str(path)


def test_a_file_that_cannot_be_read_is_named(build, monkeypatch):
    import builtins

    folder = build.hf_trainer()
    real = open

    def refuse(path, *rest, **options):
        if str(path).endswith("scheduler.pt"):
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(AccessFailed, match="Permission denied") as caught:
        read(folder)
    assert caught.value.path == str(folder / "scheduler.pt")


def test_limits_hold_for_every_file(build):
    with pytest.raises(LimitExceeded):
        ckptmove.inspect(build.hf_trainer(), limits=Limits(operations=20))


def test_a_link_is_not_read_twice(build):
    folder = build.accelerate()
    (folder / "latest.bin").symlink_to("pytorch_model.bin")
    (folder / "self").symlink_to(".")
    assert "latest.bin" not in {one.path for one in read(folder).files}


# --- the rest of the use-cases ----------------------------------------------------------------------------------------


def test_the_outline_has_every_file(build):
    folder = build.accelerate()
    (folder / "README.md").write_text("hello")
    lines = ckptmove.inspect(folder, outline=True).outline
    assert (lines[0].depth, lines[0].name, lines[0].description) == (0, "", "directory (5)")
    assert [line.name for line in lines if line.depth == 1] == [
        "README.md",
        "optimizer.bin",
        "pytorch_model.bin",
        "random_states_0.pkl",
        "scaler.pt",
    ]
    assert {line.name: line.description for line in lines if line.depth == 1}["README.md"] == "a text file"
    assert {"state", "param_groups"} <= {line.name for line in lines if line.depth == 2}
    assert ckptmove.inspect(folder).outline == ()


def test_a_directory_of_one_file_says_what_the_file_says(build, tmp_path):
    model, optimizer = build.trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}
    build.save(tmp_path / "run.pth", tree, "cuda:3", stay=())
    (tmp_path / "d").mkdir()
    shutil.copy(tmp_path / "run.pth", tmp_path / "d")
    assert codes(tmp_path / "d") == codes(tmp_path / "run.pth")
    assert "O201" in codes(tmp_path / "d")


@pytest.mark.parametrize("form", ["directory", "zip"])
def test_the_fix_of_dead_bytes_is_a_command(build, tmp_path, form):
    folder = build.hf_trainer()
    torch.save({"w": torch.ones(2)}, folder / "view.pt")
    with zipfile.ZipFile(folder / "view.pt", "a") as archive:
        archive.writestr("view/data/9", b"of no storage")
    path = Path(shutil.make_archive(str(tmp_path / "a"), "zip", folder)) if form == "zip" else folder
    [fix] = [one.fix for one in ckptmove.inspect(path).findings if one.code == "F804"]
    assert fix == f"ckptmove convert {path} --compact"
    output = tmp_path / ("out.zip" if form == "zip" else "out")
    ckptmove.convert(path, compact=True, output=output)
    assert "F804" not in {one.code for one in ckptmove.inspect(output).findings}
    assert ckptmove.diff(path, output).same


def test_the_file_that_torch_load_refuses_is_named_and_loaded(build):
    folder = build.hf_trainer("my run")
    build.save(folder / "training_args.bin", argparse.Namespace(lr=0.1))
    (finding,) = [one for one in ckptmove.inspect(folder).findings if one.code == "S701"]
    assert finding.where == ("training_args.bin",)
    assert finding.message.endswith("refuses 1 name: argparse.Namespace")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder / finding.where[0], weights_only=True)
    assert shlex.split(finding.fix) == ["ckptmove", "convert", str(folder), "--plain"]
    ckptmove.convert(folder, plain=True)
    assert torch.load(f"{folder}.new/training_args.bin", weights_only=True) == {"lr": 0.1}


def test_a_trainer_resumes_from_its_own_files(build):
    folder = build.hf_trainer("my run")
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}  # noqa: NPY002  # as transformers saves it
    build.save(folder / "rng_state.pth", state)
    (finding,) = [one for one in ckptmove.inspect(folder).findings if one.code == "S701"]
    assert (finding.severity, finding.where) == ("info", ("rng_state.pth",))
    build.save(folder / "extra.pt", argparse.Namespace(lr=0.1))
    (finding,) = [one for one in ckptmove.inspect(folder).findings if one.code == "S701"]
    assert (finding.severity, finding.where) == ("warning", ("extra.pt",))
    assert finding.message.endswith("refuses 1 name: argparse.Namespace; before torch 2.5 also 1 name: _codecs.encode")


def test_the_file_that_an_older_torch_refuses_is_named(build):
    folder = build.hf_trainer("my run")
    build.save(folder / "extra.pt", {"w": torch.ones(2), "seen": {1, 2}})
    (finding,) = [one for one in ckptmove.inspect(folder).findings if one.code == "S703"]
    assert finding.where == ("extra.pt",)
    assert finding.message.endswith("before torch 2.6 refuses 1 name: builtins.set")
    assert finding.fix == "load it with torch 2.6 or later"


def test_the_folders_of_ranks_are_one_checkpoint(build, tmp_path):
    model, optimizer = build.trained()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for rank in range(2):
        build.save(tmp_path / "megatron" / f"mp_rank_{rank:02}" / "model_optim_rng.pt", tree)
        build.save(tmp_path / "runs" / f"step_{rank:02}" / "model_optim_rng.pt", tree)
    assert read(tmp_path / "megatron").checkpoints == ()
    assert read(tmp_path / "runs").checkpoints == ("step_00", "step_01")
