"""Files of ranks with DTensors, as verl and accelerate save them, are one checkpoint with full tensors."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from copy import copy as copied
from pathlib import Path

import pytest
import torch
from distributed_checkpoints import Distributed
from torch.utils._pytree import tree_flatten
from typer.testing import CliRunner

import ckptmove
from ckptmove.assembled import rank_shards
from ckptmove.assembled.rank_shards import differing_replicas, group_by_rank, missing_by_name
from ckptmove.checkpoint.parts import FilePart
from ckptmove.cli.app import app
from ckptmove.conversion.remap.errors import ShardNotCastable
from ckptmove.errors import CrcMismatch, DamagedArchive, MissingShard, UsageError
from ckptmove.findings.context import Context
from ckptmove.findings.registry import find_all
from ckptmove.opening.checkpoint import open_checkpoint
from ckptmove.pickles.tree import Persistent, nodes
from ckptmove.proof.file_checks import check_file, fail_on_findings
from ckptmove.proof.restored import loaded
from ckptmove.proof.restored.loaded import Loaded
from ckptmove.proof.restored.pieces import PiecesTally

fsdp, tensors = map(pytest.importorskip, ("torch.distributed.fsdp", "torch.distributed.tensor"))
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has fully_shard elsewhere", allow_module_level=True)
Partial, Replicate = tensors.Partial, tensors.Replicate

STEPS = ("restore", "numbers", "step", "parity", "fresh")
VERL = {"model": "model_world_size_4_rank_*", "optim": "optim_world_size_4_rank_*"}


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of one kind, to be damaged."""
    return lambda kind: Path(shutil.copytree(saved / kind, tmp_path / kind))


def full(saved, kind):
    return torch.load(saved / f"{kind}.full.pth", weights_only=True)


def same(one, other):
    (left, spec), (right, like) = tree_flatten(one), tree_flatten(other)
    assert spec == like
    return all(
        torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
        for mine, theirs in zip(left, right, strict=True)
    )


def findings(folder, code, **options):
    return [one for one in ckptmove.inspect(folder, **options).findings if one.code == code]


def edit(path, change):
    """Save a file again after a change of its tree; DTensors are saved as they were."""
    tree = torch.load(path, weights_only=True)
    change(tree)
    torch.save(tree, path)


def failing(found):
    return {name for name, check in found.items() if check["status"] == "failed"}


# --- one checkpoint ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_file_is_read_again_for_each_tensor(saved, tmp_path, monkeypatch) -> None:
    reads = []
    content = FilePart.content
    monkeypatch.setattr(FilePart, "content", lambda part: reads.append(part.name) or content(part))
    ckptmove.convert(saved / "verl", output=tmp_path / "one.pth")
    storages = len({one.storage for one in ckptmove.inspect(saved / "verl").tensors})
    assert max(Counter(reads).values()) < 12 < storages


def test_what_is_not_sharded_is_that_of_the_first_rank(saved) -> None:
    found = ckptmove.inspect(saved / "hsdp").inventory
    assert found.layout == "sharded"
    assert [(row.path, row.devices) for row in found.files] == [(f"rank{rank:02}.pt", ("cpu",)) for rank in range(4)]
    result = ckptmove.convert(saved / "hsdp", output="x.pth", dry_run=True)
    # The last byte of its random state is the number of the rank.
    assert [note for note in result.notes if "rank00.pt are used: rng" in note]


def test_the_devices_of_the_ranks_are_shown(saved) -> None:
    said = CliRunner().invoke(app, ["inspect", str(saved / "strided")]).stdout
    assert "unknown: each rank has saved its shards from its own device (cpu)" in said


def test_the_folder_of_verl_becomes_one_file(saved, tmp_path) -> None:
    whole = full(saved, "verl")
    result = ckptmove.convert(saved / "verl", output=tmp_path / "run.pth")
    new = torch.load(tmp_path / "run.pth", weights_only=True)
    assert all(same(new[name], whole[key]) for key, name in VERL.items())
    assert not [note for note in result.notes if "are used" in note]
    restored = ckptmove.load(saved / "verl")
    assert same(restored["model_world_size_4_rank_*"], whole["model"])


@pytest.mark.parametrize("kind", ["verl", "accelerate"])
def test_it_is_proven_to_resume(saved, answers, kind) -> None:
    found = answers(saved / kind)
    assert [found[name]["status"] for name in STEPS] == ["passed"] * 5, found
    assert found["step"]["evidence"]["proven"] is True
    assert found["restore"]["evidence"]["weights_only"] is True


def test_accelerates_own_folders_of_model_and_optimizer_are_one_checkpoint(saved, tmp_path, answers) -> None:
    for number in range(2):
        shutil.copytree(saved / "accelerate", tmp_path / "runs" / f"checkpoint_{number}")
    found = ckptmove.inspect(tmp_path / "runs").inventory
    assert found.checkpoints == ("checkpoint_0", "checkpoint_1")
    found = answers(tmp_path / "runs")
    assert found["step"]["evidence"]["proven"] is True


# --- lost and mixed files ---------------------------------------------------------------------------------------------


def test_missing_ranks_are_named(copy, answers, tmp_path) -> None:
    folder = copy("strided")
    (folder / "rank02.pt").unlink()
    (finding,) = findings(folder, "F808")
    assert (finding.where, finding.severity) == (("rank02.pt",), "error")
    assert not findings(folder, "F802")
    found = answers(folder)
    assert failing(found) == {"restore", "step"}
    assert found["restore"]["detail"].startswith("shards in missing files (rank02.pt, F808): ")
    assert found["restore"]["evidence"]["unreadable"] > 1
    assert "'rank02.pt'" in found["step"]["detail"]
    assert "rank00.pt" not in found["step"]["detail"]
    with open_checkpoint(str(folder)) as checkpoint:
        check = fail_on_findings(check_file(checkpoint.parts), find_all(checkpoint.inventory, Context()))
    assert check.status == "failed"
    assert "rank02.pt" in check.detail
    with pytest.raises(MissingShard, match=r"rank02\.pt"):
        ckptmove.convert(folder, output=tmp_path / "run.pth")
    (warning,) = ckptmove.convert(folder, to="cuda:0", output=tmp_path / "moved").warnings
    assert "rank02.pt" in warning
    assert "(F808)" in warning


def test_replicas_make_up_for_missing_ranks(copy, saved, tmp_path) -> None:
    folder = copy("hsdp")
    for rank in (0, 3):
        (folder / f"rank{rank:02}.pt").unlink()
    (finding,) = findings(folder, "F808")
    assert (finding.where, finding.severity) == (("rank00.pt", "rank03.pt"), "info")
    assert not findings(folder, "F802")
    assert not ckptmove.convert(folder, to="cuda:0", dry_run=True).warnings
    assert not ckptmove.convert(folder, output=tmp_path / "run.pth").warnings
    new, whole = torch.load(tmp_path / "run.pth", weights_only=True), full(saved, "hsdp")
    assert all(same(new[key], whole[key]) for key in ("model", "optim"))


def test_the_world_size_in_a_name_tells_what_is_missing(copy) -> None:
    folder = copy("verl")
    (folder / "extra_state_world_size_4_rank_1.pt").unlink()
    (finding,) = findings(folder, "F808")
    assert finding.where == ("extra_state_world_size_4_rank_1.pt",)
    (warning,) = ckptmove.convert(folder, to="cuda:0", dry_run=True).warnings
    assert warning.count("extra_state_world_size_4_rank_1.pt") == 1
    assert not findings(folder / "model_world_size_4_rank_0.pt", "F808")


def test_a_file_that_is_unreadable_is_not_missing(copy) -> None:
    folder = copy("verl")
    path = folder / "extra_state_world_size_4_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-30])
    with open_checkpoint(str(folder), keep_going=True) as checkpoint:
        assert [type(error) for error in checkpoint.unreadable] == [DamagedArchive]
        assert not [fact for fact in checkpoint.inventory.facts if fact.kind == "missing-rank"]


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_the_other_files_of_ranks_are_still_read_together(copy, scheme) -> None:
    folder = copy("verl")
    whole = {(one.name, one.shape) for one in ckptmove.inspect(folder).inventory.tensors}
    path = folder / "model_world_size_4_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-30])
    with open_checkpoint(f"{scheme}{folder}", keep_going=True) as checkpoint:
        assert [error.path.removeprefix("file://") for error in checkpoint.unreadable] == [str(path)]
        assert {(one.name, one.shape) for one in checkpoint.inventory.tensors} == whole
        kinds = {fact.kind for fact in checkpoint.inventory.facts}
    assert kinds.isdisjoint({"missing-rank", "missing-replica", "short-storage"})


def test_missing_names_are_padded_and_limited() -> None:
    assert missing_by_name(["world_size_3_rank_001.pt"]) == ["world_size_3_rank_000.pt", "world_size_3_rank_002.pt"]
    lost = missing_by_name(f"{letter}_world_size_65536_rank_7" for letter in "abc")
    assert len(lost) == 4096
    assert (lost[0], lost[-1]) == ("a_world_size_65536_rank_0", "a_world_size_65536_rank_4096")


def test_missing_files_are_limited_over_all_groups(copy) -> None:
    folder = copy("verl")
    for path in folder.iterdir():
        path.rename(folder / path.name.replace("size_4", "size_65536"))
    with open_checkpoint(str(folder)) as checkpoint:
        kinds = [fact.kind for fact in checkpoint.inventory.facts]
    assert 4096 <= kinds.count("missing-rank") + kinds.count("missing-replica") <= 2 * 4096


def test_names_with_thousands_of_digits(tmp_path, saved) -> None:
    digits = "1" * 5000
    names = [
        f"model_world_size_{digits}_rank_0.pt", f"model_world_size_4_rank_{digits}.pt", f"rank_{digits}.pt",
        f"zero_pp_rank_{digits}_mp_rank_00_optim_states.pt", f"mp_rank_{digits}_model_states.pt",
    ]  # fmt: skip
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for name in names:
            archive.write(saved / "verl" / "model_world_size_4_rank_0.pt", name)
    found = ckptmove.inspect(tmp_path / "run.zip").inventory
    assert len(found.files) == 5


def test_a_file_of_an_earlier_save_is_named(copy) -> None:
    folder = copy("verl")
    assert not findings(folder, "F807")

    def earlier(tree):
        for state in tree["state"].values():
            state["step"] -= 1

    edit(folder / "optim_world_size_4_rank_2.pt", earlier)
    (finding,) = findings(folder, "F807")
    assert finding.where == ("optim_world_size_4_rank_2.pt",)
    for options in ({"to": "cuda:0"}, {"output": folder.parent / "run.pth", "drop": ["extra_state*"]}):
        (warning,) = ckptmove.convert(folder, dry_run=True, **options).warnings
        assert warning.endswith("(F807), and so is the output: optim_world_size_4_rank_2.pt")


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("step", [torch.tensor(float("nan")), torch.ones(2), "none"])
def test_a_step_count_that_is_no_number_is_of_no_other_save(copy, ranks, step) -> None:
    folder = copy("verl")

    def damage(tree):
        for state in tree["state"].values():
            state["step"] = copied(step)

    for rank in range(ranks):
        edit(folder / f"optim_world_size_4_rank_{rank}.pt", damage)
    assert not findings(folder, "F807")


# --- damage -----------------------------------------------------------------------------------------------------------


def spoil(path, values):
    data = bytearray(path.read_bytes())
    data[data.index(values.numpy().tobytes())] ^= 1
    path.write_bytes(data)


def last_rows(saved, name="embedding.weight"):
    """The shard of a tensor on the last of four ranks."""
    return full(saved, "verl")["model"][name][-1:]


def test_damage_is_found_in_the_file_of_each_rank(copy, saved, tmp_path) -> None:
    folder = copy("verl")
    spoil(folder / "model_world_size_4_rank_3.pt", last_rows(saved))
    spoil(folder / "model_world_size_4_rank_0.pt", torch.arange(3.0))  # a buffer, which is not a DTensor
    (finding,) = findings(folder, "F801", check=True)
    assert {path.partition("/")[0] for path in finding.where} == {
        "model_world_size_4_rank_0.pt",
        "model_world_size_4_rank_3.pt",
    }
    with open_checkpoint(str(folder)) as checkpoint:
        assert len([fact for fact in checkpoint.check() if fact.kind == "crc-mismatch"]) == 2
    with pytest.raises(CrcMismatch):
        ckptmove.convert(folder, output=tmp_path / "run.pth")
    ckptmove.convert(folder, output=tmp_path / "run.pth", check=False)


@pytest.mark.unmeasured
def test_a_replica_with_other_values_is_found(copy, answers) -> None:
    folder = copy("hsdp")

    def other(tree):
        tree["model"]["head.weight"]._local_tensor[0, 0] += 1

    assert not findings(folder, "F810")
    edit(folder / "rank03.pt", other)  # FSDP has padded this shard
    (finding,) = findings(folder, "F810")
    # With two replicas, neither is that of most ranks.
    assert (finding.severity, finding.where) == ("error", ("rank01.pt", "rank03.pt", "model.head.weight"))
    (failure,) = answers(folder)["restore"]["detail"].splitlines()
    assert "model.head.weight (rank03.pt)" in failure
    for options in ({"to": "cuda:0"}, {"output": folder.parent / "run.pth"}):
        (warning,) = ckptmove.convert(folder, dry_run=True, **options).warnings
        assert "(F810)" in warning
        assert "model.head.weight" in warning


@pytest.mark.unmeasured
def test_replicas_without_crcs_are_compared_by_their_bytes(copy) -> None:
    folder = copy("hsdp")

    def other(tree):
        tree["model"]["head.weight"]._local_tensor[0, 0] += 1

    for path in folder.iterdir():
        tree = torch.load(path, weights_only=True)
        torch.save(tree, path, _use_new_zipfile_serialization=False)
    assert not findings(folder, "F810", check=True)
    other(tree)
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    assert not findings(folder, "F810")
    (finding,) = findings(folder, "F810", check=True)
    assert {*finding.where} > {path.name, "model.head.weight"}
    with open_checkpoint(str(folder)) as checkpoint:
        assert "other-replica" in {fact.kind for fact in checkpoint.check()}


def test_the_files_whose_replica_is_not_that_of_most_are_named(saved) -> None:
    with open_checkpoint(str(saved / "hsdp"), keep_trees=True) as checkpoint:
        files = checkpoint.parts[0]._group.files
        path = "model.head.weight"
        runs = files[0].shards[path].shard.runs
        for file in files:  # all four have the same shard
            own = file.shards[path]
            file.shards[path] = own._replace(shard=own.shard._replace(runs=runs))
        for crcs, others in {(1, 1, 2, 1): (2,), (1, 2, 1, 2): (0, 1, 2, 3), (3, 1, 1, 2): (0, 3)}.items():
            for file, crc in zip(files, crcs, strict=True):
                file.shard_crcs[path] = crc
            (found,) = differing_replicas(files).items()
            assert (found[0], sorted(found[1])) == (path, [f"rank{rank:02}.pt" for rank in others])


def of_two_meshes(files):
    """The files of four ranks, as if the mesh of each had two of them only."""
    return [
        file._replace(
            shards={
                path: own._replace(shard=own.shard._replace(ranks=(rank - rank % 2, rank - rank % 2 + 1)))
                for path, own in file.shards.items()
            }
        )
        for rank, file in enumerate(files)
    ]


def add_one(tree):
    """Change every DTensor; the step counts are no DTensors."""
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, tensors.DTensor):
            leaf._local_tensor.add_(1)


@pytest.mark.parametrize("others", [(), (2,), (3,), (2, 3)])
def test_stages_of_a_pipeline_are_not_one_mesh(copy, others) -> None:
    folder = copy("hsdp")
    for rank in others:
        edit(folder / f"rank{rank:02}.pt", add_one)
    with open_checkpoint(str(folder), keep_trees=True) as checkpoint:
        files = of_two_meshes(checkpoint.parts[0]._group.files)
        # With one file of other values, its replica differs, but not the other shard.
        assert [len(group.files) for group in group_by_rank(files)] == ([] if others == (2, 3) else [4])


@pytest.mark.parametrize("kind", ["some tensors", "step counts", "two in a stage", "a common rank"])
def test_mixed_saves_are_no_stages_of_a_pipeline(copy, kind, monkeypatch) -> None:
    folder = copy("hsdp")
    for rank in (2, 3):
        edit(folder / f"rank{rank:02}.pt", add_one)
    with open_checkpoint(str(folder), keep_trees=True) as checkpoint:
        files = of_two_meshes(checkpoint.parts[0]._group.files)
        *_, path = files[0].shards
        if kind == "some tensors":
            files = [file._replace(shard_crcs={**file.shard_crcs, path: 7}) for file in files]
        elif kind == "step counts":
            monkeypatch.setattr(rank_shards, "find_two_saves", lambda files: ("rank03.pt",))
        elif kind == "two in a stage":  # what one rank of a stage has, all have
            runs = files[0].shards[path].shard.runs
            for file in files[:2]:
                own = file.shards[path]
                file.shards[path] = own._replace(shard=own.shard._replace(runs=runs))
                file.shard_crcs[path] = file.rank
        else:
            own = files[3].shards[path]
            files[3].shards[path] = own._replace(shard=own.shard._replace(ranks=(1, 2, 3)))
        assert [len(group.files) for group in group_by_rank(files)] == [4]


def test_bytes_of_a_storage_outside_of_its_shard_are_not_compared(copy) -> None:
    folder = copy("hsdp")

    def widen(tree):
        tensor = tree["model"]["head.weight"]
        local = tensor._local_tensor
        wide = torch.full((local.numel() + 9,), rank + 0.5)  # more than FSDP pads it with
        wide[: local.numel()] = local.flatten()
        tensor._local_tensor = wide[: local.numel()].view_as(local)

    for rank in range(4):
        edit(folder / f"rank{rank:02}.pt", widen)
    assert not findings(folder, "F810")


def test_what_torch_does_not_load_is_named(copy, answers, make_odd, monkeypatch) -> None:
    folder = copy("hsdp")
    make_odd(folder / "rank00.pt")
    make_odd(folder / "rank02.pt")
    found = answers(folder)["restore"]
    assert found["status"] == "passed"
    assert {part.partition(":")[0] for part in found["evidence"]["refusal"].split("; ")} == {"rank00.pt", "rank02.pt"}
    monkeypatch.setattr(loaded, "load", lambda *_, **__: Loaded(error="RuntimeError: no"))
    assert "rank00.pt: RuntimeError: no" in answers(folder)["restore"]["detail"]
    monkeypatch.setattr(loaded, "load", lambda *_, **__: Loaded())
    found = answers(folder)["restore"]
    assert found["status"] == "failed"
    assert found["evidence"]["differing"] == found["evidence"]["tensors"] * 4 - 3 * 9


def test_a_tensor_with_a_lost_shard_has_no_bytes(copy) -> None:
    folder = copy("strided")
    (folder / "rank02.pt").unlink()
    with open_checkpoint(str(folder)) as checkpoint:
        (part,) = checkpoint.parts
        missing = [one.key for one in checkpoint.inventory.storages if part.span(one.key) is None]
        assert missing
        assert all(part.storage(key) is None for key in missing)


def test_shards_that_do_not_cover_a_tensor(copy, answers) -> None:
    folder = copy("hsdp")

    def again(tree):
        tensor = tree["model"]["block.up.weight"]
        spec = tensor._spec = copied(tensor._spec)
        spec.mesh = copied(spec.mesh)
        spec.mesh._coordinate_on_dim = (0, 0)

    for rank in (1, 3):
        edit(folder / f"rank0{rank}.pt", again)
    (finding,) = findings(folder, "F802")
    assert finding.where == ("model.block.up.weight",)
    assert "120 bytes" in finding.message
    assert "model.block.up.weight" in answers(folder)["restore"]["detail"]


@pytest.mark.unmeasured
def test_an_empty_tensor(copy, tmp_path) -> None:
    folder = copy("hsdp")

    def add(tree):
        tensor = tree["model"]["head.weight"]
        meta = tensor._spec.tensor_meta._replace(shape=torch.Size((0, 3)), stride=(3, 1))
        spec = type(tensor._spec)(tensor._spec.mesh, (Replicate(), Replicate()), meta)
        tree["model"]["empty"] = type(tensor)(torch.empty(0, 3), spec, requires_grad=False)

    for path in folder.iterdir():
        edit(path, add)
    ckptmove.convert(folder, output=tmp_path / "run.pth")
    assert torch.load(tmp_path / "run.pth", weights_only=True)["model"]["empty"].shape == (0, 3)


# --- files that are not joined ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["model"].pop("head.weight"),
        lambda tree: tree.update({"a.b": tree["model"]["head.weight"], "a": {"b": tree["model"]["embedding.weight"]}}),
    ],
)
def test_ranks_with_other_tensors_are_files_of_their_own(copy, change) -> None:
    folder = copy("hsdp")
    edit(folder / "rank03.pt", change)
    names = {tensor.name.partition(".pt")[0] for tensor in ckptmove.inspect(folder).inventory.tensors}
    assert names == {"rank00", "rank01", "rank02", "rank03"}
    assert not findings(folder, "F808")


def test_files_of_the_other_byte_order_are_files_of_their_own(copy) -> None:
    """Whole tensors have the byte order of this machine, and those of the first rank that of its file."""
    folder = copy("hsdp")
    for path in folder.iterdir():
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                archive.writestr(name, b"big" if name.endswith("/byteorder") else data)
    found = ckptmove.inspect(folder).inventory
    assert {tensor.name.partition(".pt")[0] for tensor in found.tensors} == {f"rank{rank:02}" for rank in range(4)}


def test_what_cannot_be_assembled_stays_a_file_of_its_own(copy) -> None:
    folder = copy("hsdp")

    def pending(tree):
        tree["model"]["head.weight"]._spec.placements = (Partial(), Partial())

    edit(folder / "rank00.pt", pending)
    assert any(one.name.startswith("rank00.pt.") for one in ckptmove.inspect(folder).inventory.tensors)
    for path in folder.iterdir():
        path.rename(folder / f"{'abcd'[int(path.stem[-1])]}.pt")  # the names no longer tell the ranks
    names = {tensor.name.partition(".")[0] for tensor in ckptmove.inspect(folder).inventory.tensors}
    assert names == {"a", "b", "c", "d"}


# --- weights only -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_fix_of_s701_loads_the_file(saved) -> None:
    (finding,) = findings(saved / "strided", "S701")
    assert finding.severity == "info"
    python, *words = shlex.split(finding.fix)
    assert python == "python"
    assert subprocess.run([sys.executable, *words], check=False).returncode == 0  # the line that people paste


def test_other_refused_names_are_still_a_warning(copy, make_odd) -> None:
    folder = copy("verl")
    path = folder / "model_world_size_4_rank_0.pt"
    make_odd(path)
    severities = [one.severity for one in findings(path, "S701")]
    assert sorted(severities) == ["info", "warning"]
    (warning,) = (one for one in findings(path, "S701") if one.severity == "warning")
    assert warning.fix == ""


@pytest.fixture
def make_odd():
    def odd(path):
        import argparse

        edit(path, lambda tree: tree.update(options=argparse.Namespace(lr=1)))

    return odd


def test_one_file_of_a_rank_loads_too(saved, answers) -> None:
    found = answers(saved / "strided" / "rank01.pt")
    assert found["restore"]["status"] == "passed"
    assert found["restore"]["evidence"]["weights_only"] is True
    assert "the files of all ranks" in found["step"]["detail"]
    with open_checkpoint(str(saved / "strided" / "rank01.pt")) as checkpoint:
        assert not [one for one in find_all(checkpoint.inventory, Context()) if one.severity == "error"]


def test_memory_is_computed_from_the_files_of_all_ranks(saved, copy) -> None:
    assert ckptmove.inspect(saved / "strided", fit="2x1GB").fit.fits
    with pytest.raises(UsageError):
        ckptmove.inspect(saved / "strided" / "rank01.pt", fit="2x1GB")
    folder = copy("strided")
    (folder / "rank02.pt").unlink()
    with pytest.raises(UsageError, match=r"rank02\.pt"):
        ckptmove.inspect(folder, fit="2x1GB")


def test_the_shards_of_two_processes_are_added() -> None:
    tallies = [PiecesTally(ranked=3), PiecesTally(ranked=4, failed_files={"rank00.pt": "RuntimeError: no"})]
    tallies[1].differing.add("model.head.weight (rank01.pt)")
    tallies[0].join(tallies[1])
    assert tallies[0].ranked == 7
    assert tallies[0].failed_files == {"rank00.pt": "RuntimeError: no"}
    assert tallies[0].differing.failures() == ["model.head.weight (rank01.pt)"]


def test_a_torch_without_distributed_refuses_the_files(saved, answers, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", None)
    monkeypatch.setattr(loaded, "load", lambda *_, **__: Loaded(refusal="torch.distributed.tensor is missing"))
    found = answers(saved / "hsdp")["restore"]
    assert found["status"] == "skipped"
    assert found["evidence"]["weights_only"] is False


def test_a_directory_of_safetensors_replaces_the_files(saved, tmp_path) -> None:
    ckptmove.convert(saved / "verl", output=tmp_path / "new", shard_size="1KB", only=["model"])
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {Path(name).suffix for name in names} == {".safetensors", ".json"}
    found = ckptmove.inspect(tmp_path / "new").inventory
    shapes = {one.name.partition(".safetensors.")[2]: one.shape for one in found.tensors}
    assert shapes == {name: tuple(one.shape) for name, one in full(saved, "verl")["model"].items()}


@pytest.mark.unmeasured
def test_the_new_file_does_not_differ_from_the_folder(saved, tmp_path) -> None:
    folder, path = str(saved / "verl"), str(tmp_path / "run.pth")
    runner = CliRunner()
    assert runner.invoke(app, ["convert", folder, "-o", path]).exit_code == 0
    for words in (["diff", folder, path], ["diff", path, folder], ["verify", path, "--against", folder]):
        found = runner.invoke(app, words)
        assert found.exit_code == 0, (words, found.output)


def test_files_of_later_ranks_are_compared_with_their_counterparts(saved, copy, tmp_path) -> None:
    other = copy("strided")
    assert ckptmove.diff(saved / "strided", other).same
    edit(other / "rank01.pt", lambda tree: tree.update(later=7))
    (change,) = ckptmove.diff(saved / "strided", other).changed
    assert (change.name, change.what) == ("rank01.pt.later", "object")
    ckptmove.convert(saved / "strided", to="cuda:0", output=tmp_path / "moved")
    found = ckptmove.diff(saved / "strided", tmp_path / "moved")
    moved = [(one.name, one.source, one.target) for one in found.changed if one.what == "device"]
    assert moved == [(path.name, "cpu", "cuda:0, cpu") for path in sorted(other.glob("rank*"))]  # `step` stays


def test_what_is_not_compared_of_later_ranks_is_said(saved, tmp_path) -> None:
    (note,) = [one for one in ckptmove.diff(saved / "hsdp", saved / "hsdp").notes if "rng" in one]
    assert "first rank" in note
    fewer = shutil.copytree(saved / "hsdp", tmp_path / "fewer")
    (fewer / "rank03.pt").unlink()
    assert any("first rank" in one and "sharded" in one for one in ckptmove.diff(saved / "hsdp", fewer).notes)


@pytest.mark.parametrize("where", ["local", "remote"])
def test_each_tree_of_the_part_has_the_same_keys(saved, where) -> None:
    folder = str(saved / "strided")
    if where == "remote":
        pytest.importorskip("fsspec").filesystem("memory").put(folder, "/trees", recursive=True)
        folder = "memory://trees"
    with open_checkpoint(folder, keep_trees=True) as found:
        (part,) = found.parts
        keys = [{str(node.pid.items[2]) for node in nodes(part.tree()) if type(node) is Persistent} for _ in range(2)]
    assert keys[0] == keys[1] == {storage.key for storage in found.inventory.storages}


def test_several_of_them_are_named_by_their_folders(saved, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = full(saved, "hsdp")
    for name in ("a", "b"):
        Distributed.save(tmp_path / "runs" / name, tree)
    shutil.copytree(saved / "hsdp", Path("runs", "c"))
    assert CliRunner().invoke(app, ["inspect", "runs"]).stderr.endswith("next: ckptmove inspect runs/c\n")


def test_a_dtype_is_for_the_whole_tensors(saved, tmp_path) -> None:
    with pytest.raises(ShardNotCastable):
        ckptmove.convert(saved / "verl", dtype="bfloat16", output=tmp_path / "new")
    ckptmove.convert(saved / "verl", dtype="bfloat16", output=tmp_path / "new.pth")
    model = torch.load(tmp_path / "new.pth", weights_only=True)["model_world_size_4_rank_*"]
    assert {one.dtype for one in model.values() if one.is_floating_point()} == {torch.bfloat16}
    ckptmove.convert(saved / "verl", dtype="float32", output=tmp_path / "same", to="cpu")


@pytest.mark.parametrize("dtype", ["int64", "bfloat16"])
def test_a_shard_that_is_not_cast_stays(tmp_path, dtype) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        shard = tensors.DTensor.from_local(torch.ones(3, dtype=getattr(torch, dtype)), mesh, [tensors.Shard(0)])
        torch.save({"model": {"0.weight": shard, "1.weight": torch.ones(2)}}, tmp_path / "run.pth")
    finally:
        torch.distributed.destroy_process_group()
    ckptmove.convert(tmp_path / "run.pth", dtype="bfloat16", output=tmp_path / "new.pth")
    found = {one.dtype for one in ckptmove.inspect(tmp_path / "new.pth").tensors}
    assert found == {dtype, "bfloat16", "int32"}  # int32: the ranks of the mesh
