"""Converted directories: torch agrees on every file, and the output is complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from threading import Event, Lock

import pytest
import torch

import ckptmove
from ckptmove.conversion import conversion
from ckptmove.conversion import directory as moving
from ckptmove.errors import (
    CrcMismatch,
    DamagedArchive,
    OutputExists,
    OutputIsSource,
    SourceChanged,
    UncastableDtype,
    UnsupportedDtype,
    WriteFailed,
)

KINDS = ["hf_trainer", "accelerate", "deepspeed", "megatron", "sharded"]


def checkpoints(folder):
    return [folder / one.path for one in ckptmove.inspect(folder).inventory.files]


def loaded(path):
    """The object, and the tags of its storages as torch meets them."""
    tags = []

    def record(storage, tag):
        tags.append(tag)
        return storage

    return torch.load(path, map_location=record, weights_only=True), tags


def tensors_of(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_of(value, f"{path}.{key}")


def alone_beside(folder, output):
    """Whether a folder has only a directory and its output."""
    return {path.name for path in folder.parent.iterdir()} <= {folder.name, output.name}


# --- oracle -----------------------------------------------------------------------------------------------------------


@pytest.mark.unmeasured
@pytest.mark.parametrize("target", ["cpu", "cuda:1", "mps"])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_sees_the_planned_tags_and_the_same_values_in_every_file(build, kind, target):
    folder = getattr(build, kind)()
    output = folder.with_name("moved")
    result = ckptmove.convert(folder, to=target, output=output)
    edits = {edit.storage: edit.target for edit in result.plan.edits}
    planned = {one.path: Counter() for one in ckptmove.inspect(folder).inventory.files}
    for storage in ckptmove.inspect(folder).inventory.storages:
        file = next(path for path in planned if storage.key.startswith(f"{path}/"))
        planned[file][edits.get(storage.key, storage.device)] += 1
    for path in checkpoints(folder):
        name = path.relative_to(folder).as_posix()
        before, _ = loaded(path)
        after, tags = loaded(output / name)
        assert Counter(tags) == planned[name], name
        moved = dict(tensors_of(after))
        for key, old in tensors_of(before):
            new = moved.pop(key)
            assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride()), key
            assert torch.equal(new, old), key
        assert moved == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "deepspeed"])
def test_there_and_back_is_the_same_directory(build, snapshot, kind):
    folder = getattr(build, kind)(device="cuda:0") if kind != "megatron" else build.megatron()
    away, back = folder.with_name("away"), folder.with_name("back")
    ckptmove.convert(folder, to="xpu:1", output=away)
    assert snapshot(away) != snapshot(folder)
    ckptmove.convert(away, to="cuda:0", output=back)
    assert snapshot(back) == snapshot(folder)


def test_a_directory_that_is_as_asked_is_copied_as_it_is(build, snapshot):
    folder = build.hf_trainer()
    result = ckptmove.convert(folder, to="cuda:0", output=folder.with_name("same"))
    assert result.plan.is_empty
    assert result.bytes_copied == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert snapshot(folder.with_name("same")) == snapshot(folder)


def test_a_converted_directory_needs_no_conversion(build):
    for kind in KINDS:
        folder = getattr(build, kind)(f"{kind}-source")
        output = ckptmove.convert(folder, to="cuda:1").output
        assert ckptmove.convert(output, to="cuda:1", dry_run=True).plan.is_empty
        assert ckptmove.inspect(output, expect="cuda:1").plan.edits == ()


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_ranks_are_mapped_to_one_device(build):
    folder = build.deepspeed(ranks=3)
    output = Path(ckptmove.convert(folder, map_location={"cuda:*": "cuda:0"}).output)
    assert output.name == "run.moved"
    devices = {tensor.device for tensor in ckptmove.inspect(output).inventory.tensors}
    assert devices == {"cuda:0", "cpu"}
    for path in checkpoints(output):
        assert set(loaded(path)[1]) <= {"cuda:0", "cpu"}


def test_scalars_follow_the_moments_of_their_own_optimizer(build):
    folder = build.hf_trainer()
    state = build.trained()[1].state_dict()
    state["param_groups"][0]["capturable"] = True
    build.save(folder / "optimizer.pt", state, "cuda:0", stay=())
    plan = ckptmove.convert(folder, to="cuda:1", dry_run=True).plan
    targets = {name: edit.target for edit in plan.edits for name in edit.names}
    assert targets["optimizer.pt.state.0.step"] == targets["optimizer.pt.state.0.exp_avg"] == "cuda:1"
    output = Path(ckptmove.convert(folder, to="cpu").output)
    assert [flag.where for flag in ckptmove.convert(folder, to="cpu", dry_run=True).plan.flags] == [
        "optimizer.pt.param_groups.0.capturable",
        "training_args.bin.device",
    ]
    assert loaded(output / "optimizer.pt")[0]["param_groups"][0]["capturable"] is False
    assert loaded(output / "training_args.bin")[0]["device"] == torch.device("cpu")


def test_a_device_named_in_one_file_follows_the_tensors_of_the_others(build):
    folder = build.hf_trainer()
    plan = ckptmove.convert(folder, to="cpu", keep=["pytorch_model.bin.*", "optimizer.pt.*"], dry_run=True).plan
    assert plan.is_empty, "nothing leaves cuda:0, so that what names it is still right"


def test_what_is_kept_is_named_by_its_file(build):
    folder = build.accelerate()
    output = Path(ckptmove.convert(folder, to="cpu", keep=["pytorch_model.bin.0.*"]).output)
    _, tags = loaded(output / "pytorch_model.bin")
    assert Counter(tags) == {"cuda:0": 2, "cpu": 2}
    [missed] = ckptmove.convert(folder, to="cpu", keep=["0.weight"], dry_run=True).unmatched
    assert (missed.option, missed.glob) == ("keep", "0.weight")


def test_a_cast_reaches_every_file(build, tmp_path):
    folder = tmp_path / "d"
    for name in ("a.pt", "b.pt"):
        build.save(folder / name, {"0.weight": torch.ones(3, dtype=torch.float64) / 3}, "cuda:0")
    with pytest.raises(UnsupportedDtype, match=r"a\.pt\.0\.weight"):
        ckptmove.convert(folder, to="mps")
    output = Path(ckptmove.convert(folder, to="mps", cast=True).output)
    for name in ("a.pt", "b.pt"):
        weight = loaded(output / name)[0]["0.weight"]
        assert torch.equal(weight, torch.full((3,), 1 / 3, dtype=torch.float64).float())


def test_values_that_a_cast_made_infinite_are_counted_over_all_files(build, tmp_path):
    folder = tmp_path / "d"
    for name in ("a.pt", "b.pt"):
        build.save(folder / name, {"0.weight": torch.full((3,), 1e300, dtype=torch.float64)}, "cuda:0")
    assert any("6 values " in note for note in ckptmove.convert(folder, to="mps", cast=True).notes)


def test_legacy_streams_in_a_directory(build, tmp_path):
    folder = tmp_path / "d"
    build.save(folder / "old.pth", {"0.weight": torch.ones(3)}, "cuda:0", _use_new_zipfile_serialization=False)
    build.save(folder / "new.pth", {"0.weight": torch.ones(3)}, "cuda:0")
    result = ckptmove.convert(folder, to="cpu")
    assert loaded(Path(result.output) / "old.pth")[1] == ["cpu"]
    (note,) = result.notes
    assert "CRC" in note
    assert note.endswith(": old.pth")


def test_a_dry_run_writes_nothing(build, snapshot):
    folder = build.hf_trainer()
    before = snapshot(folder.parent)
    result = ckptmove.convert(folder, to="cpu", dry_run=True)
    assert result.output is None
    assert result.plan.edits
    assert snapshot(folder.parent) == before


# --- other files ------------------------------------------------------------------------------------------------------


def test_everything_else_is_copied(build, snapshot):
    folder = build.hf_trainer()
    (folder / "empty").mkdir()
    (folder / ".cache" / "deep").mkdir(parents=True)
    (folder / ".cache" / "deep" / "x.pt").write_bytes(b"PK\x03\x04 of no use")
    (folder / "zero").touch()
    (folder / "best").symlink_to(folder / "pytorch_model.bin")
    (folder / "lost").symlink_to("nowhere")
    (folder / "round").symlink_to("round")
    before = snapshot(folder)
    output = Path(ckptmove.convert(folder, to="cpu").output)
    after = snapshot(output)
    assert after.keys() == before.keys()
    same = {name for name in before if after[name] == before[name]}
    assert before.keys() - same == {"pytorch_model.bin", "optimizer.pt", "training_args.bin", "best"}
    assert after["best"] == "-> pytorch_model.bin"
    assert (output / "best").read_bytes() == (output / "pytorch_model.bin").read_bytes()
    assert snapshot(folder) == before


def test_permission_bits_stay(build):
    folder = build.accelerate()
    (folder / "optimizer.bin").chmod(0o600)
    (folder / "notes.sh").touch()
    (folder / "notes.sh").chmod(0o755)
    (folder / "shut").mkdir()
    (folder / "shut").chmod(0o500)
    folder.chmod(0o750)
    output = Path(ckptmove.convert(folder, to="cpu").output)
    modes = {name: stat.S_IMODE((output / name).stat().st_mode) for name in ("optimizer.bin", "notes.sh", "shut", "")}
    assert modes == {"optimizer.bin": 0o600, "notes.sh": 0o755, "shut": 0o700, "": 0o750}


# --- the output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "output"), [("run-1.5", "run-1.5.cuda0"), ("run-1.5/", "run-1.5.cuda0"), ("./run-1.5", "./run-1.5.cuda0")]
)
def test_the_default_output_lies_beside_the_directory(build, monkeypatch, typed, output):
    folder = build.accelerate("run-1.5")
    monkeypatch.chdir(folder.parent)
    assert ckptmove.convert(typed, to="cuda:0").output == output
    assert Path(output).is_dir()


@pytest.mark.parametrize("typed", [".", "./", "inner/.."])
def test_a_directory_without_a_name_gets_its_own(build, monkeypatch, typed):
    folder = build.accelerate("run")
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder)
    assert ckptmove.convert(typed, to="cuda:0").output == f"{folder}.cuda0"


def test_an_existing_output_is_refused_before_anything_is_written(build, snapshot):
    folder = build.accelerate()
    output = folder.with_name("out")
    output.mkdir()
    with pytest.raises(OutputExists):
        ckptmove.convert(folder, to="cpu", output=output)
    assert snapshot(output) == {}
    assert alone_beside(folder, output)


def test_force_replaces_what_an_earlier_conversion_left(build):
    folder = build.accelerate()
    output = Path(ckptmove.convert(folder, to="cpu").output)
    ckptmove.convert(folder, to="mps", output=output, force=True)
    assert set(loaded(output / "pytorch_model.bin")[1]) == {"mps"}
    assert alone_beside(folder, output)


def test_what_could_not_be_removed_is_told(build, monkeypatch):
    folder = build.accelerate()
    output = ckptmove.convert(folder, to="cpu").output
    real = shutil.rmtree

    def refuse(path, **options):
        if str(path).endswith(".old"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    notes = ckptmove.convert(folder, to="mps", output=output, force=True).notes
    assert any(note.endswith(".old") for note in notes)


@pytest.mark.parametrize(
    ("output", "relation"),
    [
        ("run", "is the source"),
        ("link", "is the source"),
        ("run/inner/out", "inside the source"),
        ("", "holds the source"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_source_and_output_lie_apart(build, snapshot, tmp_path, output, relation, force):
    folder = build.accelerate("above/run")
    (folder / "inner").mkdir()
    (folder.parent / "link").symlink_to("run")
    before = snapshot(tmp_path)
    with pytest.raises(OutputIsSource, match=relation):
        ckptmove.convert(folder, to="cpu", output=folder.parent / output, force=force)
    assert snapshot(tmp_path) == before


def test_progress_is_over_all_files(build):
    folder = build.hf_trainer()
    seen = []
    ckptmove.convert(folder, to="cuda:0", progress=lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert {one for _, one in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == total


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_in_the_middle_leaves_nothing(build, monkeypatch, snapshot, code):
    folder = build.hf_trainer()
    before = snapshot(folder.parent)
    real, calls = os.write, []

    def fail(fd, data):
        calls.append(fd)
        if len(calls) > 8:
            raise OSError(code, os.strerror(code))
        return real(fd, data)

    monkeypatch.setattr(os, "write", fail)
    output = folder.with_name("out")
    with pytest.raises(WriteFailed) as caught:
        ckptmove.convert(folder, to="cpu", output=output)
    assert caught.value.reason == os.strerror(code)
    assert Path(caught.value.path).parent == output
    assert snapshot(folder.parent) == before


def test_a_file_that_fails_ends_those_that_are_being_written(build, monkeypatch, snapshot):
    folder = build.hf_trainer()
    before = snapshot(folder.parent)
    first, begun = Lock(), Event()

    def write(source, segments, sink, progress, *_):
        if first.acquire(blocking=False):
            begun.wait()
            raise CrcMismatch(source.path, "x")
        begun.set()
        while True:  # until it gets the end message
            progress(0, 1)

    monkeypatch.setattr(moving, "write_segments", write)
    with pytest.raises(CrcMismatch):
        ckptmove.convert(folder, to="cpu", output=folder.with_name("out"))
    assert snapshot(folder.parent) == before


def test_a_disk_without_room_for_all_of_it_is_not_written_to(build, monkeypatch, snapshot):
    folder = build.hf_trainer()
    before = snapshot(folder.parent)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: (36_864, 32_768, 4096))
    with pytest.raises(WriteFailed, match=f"{size:,} .*4,096 ") as caught:
        ckptmove.convert(folder, to="cpu", output=folder.with_name("out"))
    assert caught.value.path == str(folder.with_name("out"))
    assert snapshot(folder.parent) == before


@pytest.mark.parametrize("check", [True, False])
def test_a_flipped_bit_ends_it_unless_nobody_looks(build, snapshot, check):
    folder = build.hf_trainer()
    before = sorted(folder.parent.iterdir())
    path = folder / "optimizer.pt"
    with zipfile.ZipFile(path) as archive:
        (info,) = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
    data = bytearray(path.read_bytes())
    data[info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26))] ^= 4
    path.write_bytes(data)
    if check:
        with pytest.raises(CrcMismatch):
            ckptmove.convert(folder, to="cpu")
        assert sorted(folder.parent.iterdir()) == before
    else:
        output = Path(ckptmove.convert(folder, to="cpu", check=False).output)
        with zipfile.ZipFile(output / "optimizer.pt") as archive:
            assert archive.testzip() == info.filename


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json"])
def test_a_file_that_changes_meanwhile_ends_it(build, monkeypatch, moment, name):
    folder = build.hf_trainer()
    real = moving._DirectoryWriter._copy if name.endswith("json") else moving._DirectoryWriter._convert

    def touch():
        os.utime(folder / name, (1, 1))

    def write(self, of, *rest):
        real(self, of, *rest)
        if moment == "after" and getattr(of, "name", of) == name:
            touch()

    monkeypatch.setattr(moving._DirectoryWriter, real.__name__, write)
    if moment == "before":
        planned = conversion.plan_move

        def plan_move(*args):
            touch()
            return planned(*args)

        monkeypatch.setattr(conversion, "plan_move", plan_move)
    with pytest.raises(SourceChanged) as caught:
        ckptmove.convert(folder, to="cpu", output=folder.with_name("out"))
    assert caught.value.path == str(folder / name)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_damaged_file_ends_it_before_anything_is_written(build):
    folder = build.hf_trainer()
    path = folder / "scheduler.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedArchive) as caught:
        ckptmove.convert(folder, to="cpu")
    assert caught.value.path == str(path)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# --- TorchScript and other files --------------------------------------------------------------------------------------


@pytest.fixture
def scripted(build):
    """A directory with a module of TorchScript in it, in float64."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x):
            return x * self.weight

    folder = build.accelerate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on the age of TorchScript
        torch.jit.save(torch.jit.script(Scaled()), folder / "scripted.pt")
    return folder


def test_a_module_of_torchscript_moves_with_the_rest(scripted):
    output = Path(ckptmove.convert(scripted, map_location={"cpu": "cuda:0"}).output)
    inventory = ckptmove.inspect(output).inventory
    assert {tensor.name: tensor.device for tensor in inventory.tensors}["scripted.pt.weight"] == "cuda:0"


def test_code_is_not_cast_under_its_feet(scripted):
    with pytest.raises(UncastableDtype, match=r"scripted\.pt\.weight"):
        ckptmove.convert(scripted, to="mps", cast=True)
