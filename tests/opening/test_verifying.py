"""Directories verified as one checkpoint: the model in one file, its optimizer's state in another."""

from __future__ import annotations

import json
import pickle
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from simulation import on_a_simulated_device

import ckptmove
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.limits import Limits
from ckptmove.moves import MoveRequest
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.proof.file_checks import check_file, check_structure, fail_on_findings
from ckptmove.proof.placement import check_placement
from ckptmove.proof.tensors.stored import StoredTensors

STEPS = ("step", "parity", "fresh")


@pytest.fixture
def here():
    """The checks that need no torch, by name."""

    def look(path, to="cpu"):
        with open_checkpoint(str(path), Limits()) as checkpoint:
            inventory = checkpoint.inventory
            pairings = list(zip(inventory.optimizers, pair_all(inventory), strict=True))
            checks = (
                check_file(checkpoint.parts),
                check_placement(inventory, MoveRequest(to=to)),
                check_structure(inventory, pairings),
            )
        return {check.name: check for check in checks}

    return look


def in_safetensors(folder):
    """The model as the HF Trainer writes it today."""
    weights = torch.load(folder / "pytorch_model.bin", map_location="cpu")
    (folder / "pytorch_model.bin").unlink()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def twins(build, folder):
    """A model whose two layers have one shape, sorted by its file, in two groups as the HF Trainer makes them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    names = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for name, one in names.items() if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [one for name, one in names.items() if name.endswith("bias")], "weight_decay": 0.0},
        ]
    )
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    build.save(folder / "optimizer.pt", optimizer.state_dict())
    return folder


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def statuses(found, names=STEPS):
    return [found[name]["status"] for name in names]


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["cpu", "cuda:0"])
def test_the_model_of_one_file_is_stepped_with_the_state_of_another(build, answers, to):
    for folder in (
        build.hf_trainer("bin"),
        build.hf_trainer("shards", shards=2),
        build.accelerate(),
        in_safetensors(build.hf_trainer("safe")),
    ):
        found = answers(folder, to)
        assert statuses(found, ("restore", "numbers", *STEPS)) == ["passed"] * 5, found
        evidence = found["step"]["evidence"]
        assert (evidence["parameters"], evidence["moved"], evidence["standins"]) == (4, 4, 0)
        assert (evidence["proven"], evidence["unproven"]) == (True, "")


@on_a_simulated_device
def test_a_verdict_through_the_child(build):
    folder = in_safetensors(build.hf_trainer())
    told = []
    result = ckptmove.verify(folder, progress=lambda done, total: told.append((done, total)))
    assert (result.passed, result.target, result.mode, result.proven) == (True, "cuda:0", "simulated", True)
    assert told[-1][0] <= told[-1][1] == sum(file.size_bytes for file in ckptmove.inspect(folder).inventory.files)
    checks = {check.name: check for check in result.checks}
    evidence = {name: dict(check.evidence) for name, check in checks.items()}
    assert (evidence["structure"]["paired"], evidence["structure"]["paired_by"]) == (4, "shapes")
    assert evidence["file"]["checksums"] is False
    assert checks["file"].detail.endswith(": model.safetensors")


def test_one_of_several_files_may_be_damaged(build):
    folder = build.hf_trainer()
    path = folder / "optimizer.pt"
    content = bytearray(path.read_bytes())
    at = content.index(torch.load(path, map_location="cpu")["state"][0]["exp_avg"].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    result = ckptmove.verify(folder)
    assert next(check.name for check in result.checks if check.status == "failed") == "file"
    assert any(finding.code == "F801" and "optimizer.pt" in finding.where[0] for finding in result.findings)


def test_which_of_several_tensors_of_one_shape_is_whose_is_not_told(build, answers, here, tmp_path):
    folder = twins(build, tmp_path / "twins")
    found = answers(folder)
    assert statuses(found) == ["passed"] * 3
    assert found["step"]["evidence"]["proven"] is False
    reason = (
        "which tensors optimizer.pt trains is ambiguous: "
        "safetensors has sorted the model's tensors, and several have one shape"
    )
    assert found["step"]["evidence"]["unproven"] == reason
    assert found["step"]["detail"].endswith(reason)
    structure = here(folder)["structure"]
    evidence = dict(structure.evidence)
    assert (evidence["paired"], evidence["paired_by"]) == (4, "ambiguous")


def test_the_verdict_says_why_it_is_not_proven(build, tmp_path):
    from ckptmove.cli.render.verification import outcome

    result = ckptmove.verify(twins(build, tmp_path / "twins"))
    assert (result.passed, result.proven) == (True, False)
    assert outcome(result).startswith("passed, cpu, ")
    assert " optimizer.pt " in outcome(result)


def test_each_optimizer_is_for_the_model_in_its_own_folder(build):
    for number in (1, 2):
        build.hf_trainer(f"run/checkpoint-{number}")
    in_safetensors(build.root / "run" / "checkpoint-2")
    first, second = pair_all(ckptmove.inspect(build.root / "run").inventory)
    assert (first.how, second.how) == ("order", "shapes")
    assert first.matches[0][1].name == "checkpoint-1/pytorch_model.bin.0.weight"
    assert second.matches[0][1].name == "checkpoint-2/model.safetensors.0.weight"


def test_two_optimizers_of_one_folder(build):
    folder = build.accelerate()
    shutil.copy(folder / "optimizer.bin", folder / "optimizer_1.bin")
    assert [pairing.how for pairing in pair_all(ckptmove.inspect(folder).inventory)] == ["order", "order"]


def test_an_optimizer_in_a_folder_of_its_own_is_for_the_model_elsewhere(build):
    folder = build.hf_trainer()
    (folder / "optim").mkdir()
    (folder / "optimizer.pt").rename(folder / "optim" / "optimizer.pt")
    (pairing,) = pair_all(ckptmove.inspect(folder).inventory)
    assert pairing.how == "order"


def test_state_of_another_model_fails(build, answers, here):
    folder = in_safetensors(build.hf_trainer())
    save_file({"0.weight": torch.ones(5, 5), "0.bias": torch.ones(7)}, folder / "model.safetensors")
    found = ckptmove.inspect(folder).findings
    assert "O204" in {one.code for one in found}
    assert fail_on_findings(here(folder)["structure"], found).status == "failed"
    assert answers(folder)["step"]["status"] == "skipped"
    (pairing,) = pair_all(ckptmove.inspect(folder).inventory)
    assert pairing.reason.endswith("and the shapes of the state do not fit them")


def test_state_that_does_not_tell_shapes_pairs_nothing(build):
    folder = in_safetensors(build.hf_trainer())
    state = {"state": {0: {"quantized": torch.ones(3)}}, "param_groups": [{"lr": 1.0, "params": [0, 1, 2, 3]}]}
    build.save(folder / "optimizer.pt", state)
    (pairing,) = pair_all(ckptmove.inspect(folder).inventory)
    assert (pairing.how, pairing.reason.endswith("and the state does not tell the parameters' shapes")) == (
        "none",
        True,
    )


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_flat_state_of_ranks_is_not_stepped(build, answers, here):
    folder = build.deepspeed()
    found, checks = answers(folder, "cuda:0"), here(folder)
    assert statuses(found, ("restore", "numbers", *STEPS)) == ["passed", "passed", "skipped", "skipped", "skipped"]
    assert found["step"]["detail"] == "ZeRO keeps the optimizer's state in flat runs (2 files), and not by parameter"
    assert checks["structure"].status == "skipped"
    assert found["step"]["detail"] in checks["structure"].detail


def test_parameters_cut_over_ranks_are_not_stepped(build, answers):
    folder = build.megatron()
    assert statuses(answers(folder, "cuda:0")) == ["passed"] * 3
    shutil.copytree(folder / "iter_0000010" / "mp_rank_00", folder / "iter_0000010" / "mp_rank_01")
    found = answers(folder, "cuda:0")
    assert statuses(found) == ["skipped"] * 3
    assert found["step"]["detail"].endswith("over 2 ranks of model parallelism")


# --- file -------------------------------------------------------------------------------------------------------------


def test_files_without_crcs_are_named(build, here, tmp_path):
    folder = in_safetensors(build.hf_trainer())
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            path.unlink()
    assert here(folder)["file"].detail.endswith(": model.safetensors")
    assert dict(here(build.accelerate())["file"].evidence)["checksums"] is True


def test_weights_alone_name_no_device(build):
    folder = in_safetensors(build.hf_trainer())
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            path.unlink()
    result = ckptmove.verify(folder)
    checks = {check.name: check.status for check in result.checks}
    assert (checks["placement"], checks["step"], result.passed, result.proven) == ("skipped", "skipped", True, False)


def test_settings_need_not_follow(build, here):
    folder = build.hf_trainer(device="cuda:0")
    assert here(folder, "cuda:0")["placement"].status == "passed"
    build.save(folder / "training_args.bin", {"device": torch.device("cuda:3"), "seed": 1})
    assert here(folder, "cuda:0")["placement"].status == "passed"


# --- restore ----------------------------------------------------------------------------------------------------------


def libraries(found):
    """The libraries whose tensors were compared with those in the files."""
    return [name for name in ("torch.load", "safetensors") if name in found["restore"]["detail"]]


def test_each_file_is_loaded_by_its_own_library(build, answers):
    folder = in_safetensors(build.hf_trainer())
    assert libraries(answers(folder)) == ["torch.load", "safetensors"]
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            path.unlink()
    assert libraries(answers(folder)) == ["safetensors"]
    assert libraries(answers(build.accelerate())) == ["torch.load"]


def test_a_file_that_is_refused_is_named_and_the_others_are_compared(build, answers):
    folder = build.hf_trainer()
    build.save(folder / "rng_state.pth", {"cpu": torch.get_rng_state(), "odd": Namespace(a=1)})
    build.save(folder / "args.pt", Namespace(a=1))
    restore = answers(folder)["restore"]
    assert restore["status"] == "passed"
    assert ": rng_state.pth (" in restore["detail"]
    assert (restore["evidence"]["compared"], restore["evidence"]["weights_only"]) == (16, False)
    assert "args.pt" not in restore["detail"]


def test_where_every_file_is_refused_nothing_is_compared(build, answers):
    folder = build.root / "d"
    model, optimizer = build.trained()
    build.save(folder / "pytorch_model.bin", {**model.state_dict(), "odd": Namespace(a=1)})
    build.save(folder / "optimizer.pt", {**optimizer.state_dict(), "odd": Namespace(a=1)})
    found = answers(folder)
    assert found["restore"]["status"] == "skipped"
    assert (found["restore"]["evidence"]["compared"], found["restore"]["evidence"]["weights_only"]) == (0, False)
    assert found["parity"]["detail"].endswith("because torch.load refuses these files")
    build.save(folder / "pytorch_model.bin", model.state_dict())
    parity = answers(folder)["parity"]
    assert parity["status"] == "passed"
    assert ", optimizer.pt " in parity["detail"]


def test_a_file_that_cannot_be_loaded_fails_and_is_named(build, answers, monkeypatch):
    folder = build.hf_trainer()
    load = torch.load

    def fail(path, **options):
        if path.endswith("scheduler.pt"):
            raise RuntimeError("no such version")
        return load(path, **options)

    monkeypatch.setattr(torch, "load", fail)
    restore = answers(folder)["restore"]
    assert restore["status"] == "failed"
    assert ": scheduler.pt: RuntimeError: " in restore["detail"]


def test_a_pickle_beside_checkpoints_is_the_scripts_own(build, answers):
    folder = build.hf_trainer()
    (folder / "labels.pkl").write_bytes(pickle.dumps({"cat": 0}))
    assert answers(folder)["restore"]["status"] == "passed"


def test_numbers_of_a_scheduler_are_looked_at_in_its_file(build):
    folder = build.hf_trainer()
    build.save(folder / "scheduler.pt", {"base_lrs": [float("nan")], "last_epoch": 1, "_step_count": 2, "_last_lr": []})
    [numbers] = [one for one in ckptmove.verify(folder, to="cpu").checks if one.name == "numbers"]
    assert numbers.status == "failed"
    assert "scheduler.pt.base_lrs is nan" in numbers.detail


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not tell which files are open")
def test_few_files_are_open_at_once(build):
    folder = build.root / "many"
    for number in range(40):
        build.save(folder / "deep" / f"{number:02}.pt", {"w": torch.full((4,), float(number))})
    open_before = open_files()
    with open_checkpoint(str(folder), Limits()) as checkpoint, StoredTensors(checkpoint.parts) as stored:
        for _ in range(2):
            for number, record in enumerate(checkpoint.inventory.tensors):
                assert stored.tensor(record)[0] == number
        assert open_files() <= open_before + 16
        assert stored.place(checkpoint.inventory.tensors[0]._replace(storage="deep/none.pt/0")) is None
        assert checkpoint.check() == ()


# --- against an original ----------------------------------------------------------------------------------------------


@on_a_simulated_device
def test_a_converted_directory_is_what_the_original_was(build):
    folder = in_safetensors(build.hf_trainer(device="cuda:1"))
    output = ckptmove.convert(folder, to="cuda:0").output
    result = ckptmove.verify(output, against=folder)
    restore = next(check for check in result.checks if check.name == "restore")
    assert result.passed, result
    assert restore.detail.endswith(f"all equal {folder}, ignoring devices")


def remove_file(folder):
    (folder / "scheduler.pt").unlink()


def add_file(folder):
    (folder / "notes.txt").write_text("hello")


def add_checkpoint(folder):
    torch.save({"last_epoch": 1}, folder / "extra.pt")


def change_text(folder):
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))


def change_option(folder):
    tree = torch.load(folder / "optimizer.pt", map_location="cpu")
    tree["param_groups"][0]["lr"] = 5.0
    torch.save(tree, folder / "optimizer.pt")


def change_value(folder):
    tree = load_file(folder / "model.safetensors")
    tree["0.bias"] = tree["0.bias"] + 1
    save_file(tree, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove_file, "scheduler.pt is missing"),
        (add_file, "notes.txt is not in the original"),
        (add_checkpoint, "extra.pt is not in the original"),
        (change_text, "trainer_state.json is sha256"),
        (change_option, "optimizer.pt.param_groups.0.lr is 5.0 in place of 0.001"),
        (change_value, "model.safetensors.0.bias: other bits"),
    ],
)
def test_what_is_not_as_in_the_original_is_named(build, answers, change, said):
    folder = in_safetensors(build.hf_trainer(device="cpu"))
    copy = build.root / "copy"
    shutil.copytree(folder, copy)
    change(copy)
    restore = answers(copy, against=str(folder))["restore"]
    assert restore["status"] == "failed"
    assert said in restore["detail"]


def test_a_file_does_not_equal_a_directory_of_other_tensors(build):
    folder, file = build.hf_trainer(), build.root / "other.pt"
    build.save(file, {"w": torch.ones(3)})
    for path, original in ((folder, file), (file, folder)):
        found = {check.name: check for check in ckptmove.verify(path, against=original).checks}
        assert found["restore"].status == "failed"
        assert "is in the original, by name or by content" in found["restore"].detail


def test_a_model_of_another_folder_may_be_of_another_save(build, answers, tmp_path):
    first = build.hf_trainer("bin")
    whole = tmp_path / "runs"
    shutil.copytree(first, whole / "checkpoint-1")
    shutil.copytree(first, whole / "checkpoint-2")
    (whole / "checkpoint-1" / "optimizer.pt").unlink()
    (whole / "checkpoint-2" / "pytorch_model.bin").unlink()
    evidence = answers(whole)["step"]["evidence"]
    assert evidence["proven"] is False
    assert "'checkpoint-1'" in evidence["unproven"]
    assert answers(whole / "checkpoint-2")["step"]["evidence"].get("proven") is not True
