"""``diff`` of directories and archives agrees with torch.load of both."""

from __future__ import annotations

import builtins
import collections
import json
import os
import shutil
import tarfile
import threading
import tracemalloc
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import ckptmove
from ckptmove.checkpoint import open_files
from ckptmove.comparison.differences import Change, Gap, Uncompared
from ckptmove.errors import (
    CrcMismatch,
    DamagedArchive,
    EmptyDirectory,
    LimitExceeded,
    MissingShard,
    MustBeUnpacked,
    NotACheckpoint,
    SourceChanged,
    UnreadableInput,
)
from ckptmove.io.at_once import Workers
from ckptmove.limits import Limits
from ckptmove.opening.checkpoint import open_checkpoint

LAYOUTS = ["hf_trainer", "accelerate", "deepspeed", "megatron", "sharded"]


def diff(one, other, **options):
    return ckptmove.diff(str(one), str(other), **options)


def tensors_of(tree, path):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors_of(value, f"{path}.{key}")


def loaded(folder):
    """Every tensor that torch and safetensors find in a directory, by the path of its file and its keys."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in {".bin", ".pt", ".pth", ".pkl"}:
            found |= dict(tensors_of(torch.load(path, map_location="cpu", weights_only=False), name))
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as stored:
                found |= {f"{name}.{key}": stored.get_tensor(key) for key in stored.keys()}
    return found


def change_one(path, name):
    """Add two to one tensor of a file."""
    tree = torch.load(path, weights_only=False, map_location="cpu")
    (tensor,) = (tensor for found, tensor in tensors_of(tree, "") if found == f".{name}")
    tensor += 2
    torch.save(tree, path)


def packed(folder, path, top="", method=zipfile.ZIP_STORED):
    """An archive of a directory, as ``tar`` and ``zip`` make it."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    if path.suffix == ".tar":
        with tarfile.open(path, "w") as archive:
            for file in files:
                archive.add(file, top + file.relative_to(folder).as_posix())
    else:
        with zipfile.ZipFile(path, "w", method) as archive:
            for file in files:
                archive.write(file, top + file.relative_to(folder).as_posix())
    return path


# --- one directory and its copy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_of_a_directory_is_the_same(build, layout, tmp_path):
    folder = (
        getattr(build, layout)(device="cpu") if layout not in {"deepspeed", "megatron"} else getattr(build, layout)()
    )
    shutil.copytree(folder, tmp_path / "copy")
    result = diff(folder, tmp_path / "copy")
    assert result.same
    assert result.notes == ()
    assert result.tensors == len(ckptmove.inspect(folder).inventory.tensors)


@pytest.mark.parametrize("layout", ["hf_trainer", "accelerate", "sharded"])
def test_what_differs_is_what_torch_finds_to_differ(build, layout):
    one, other = getattr(build, layout)("one", device="cpu"), getattr(build, layout)("other", device="cpu")
    for name in [name for name in loaded(other) if name.endswith(("exp_avg", "weight"))]:
        file, suffix, own = name.partition(".bin.") if ".bin." in name else name.partition(".pt.")
        change_one(other / (file + suffix[:-1]), own)
    result = diff(one, other)
    ours, theirs = loaded(one), loaded(other)
    assert ours.keys() == theirs.keys()
    apart = {
        name: (ours[name] - theirs[name]).abs().max().item()
        for name in ours
        if not torch.equal(ours[name], theirs[name])
    }
    assert len(apart) >= 2
    assert {change.name: change.gap.max_abs for change in result.changed} == pytest.approx(apart)
    assert {change.what for change in result.changed} == {"value"}
    assert result.tensors == len(ours)


def test_a_conversion_of_a_directory_changes_devices_alone(build, tmp_path):
    folder = build.hf_trainer()
    ckptmove.convert(folder, to="cpu", output=tmp_path / "cpu")
    result = diff(folder, tmp_path / "cpu")
    assert {(change.what, change.source, change.target) for change in result.changed} >= {("device", "cuda:0", "cpu")}
    assert "value" not in {change.what for change in result.changed}
    assert [change.name for change in result.changed if change.what == "object"] == [
        "the length of training_args.bin.device"
    ]


def test_files_without_tensors_are_compared_byte_by_byte(build):
    one, other = build.hf_trainer("one"), build.hf_trainer("other")
    (other / "vocab.txt").write_text("a\nc\n")
    (one / "merges.txt").write_text("x")
    (other / "logs").mkdir()
    (other / "logs" / "log.txt").write_text("x" * 3_000_000)
    (other / ".cache").mkdir()
    (other / ".cache" / "lock").write_text("")
    said = [(change.name, change.what, change.source[:7], change.target[:7]) for change in diff(one, other).changed]
    assert said == [
        ("merges.txt", "object", "sha256 ", "absent"),
        ("vocab.txt", "object", "sha256 ", "sha256 "),
        ("logs/log.txt", "object", "absent", "sha256 "),
    ]


def test_what_no_checkpoint_is_looked_for_in_is_named(build, tmp_path):
    one, other = build.hf_trainer("a"), build.hf_trainer("b")
    (one / "both").mkdir()
    (other / "both").mkdir()
    assert diff(one, other).notes == ()
    for number in range(5):
        (other / f".git/objects/{number}").mkdir(parents=True)
        (other / f".git/objects/{number}/data").write_text("x")
    (one / ".git").mkdir()
    (one / ".git/objects").write_text("y")
    (one / "plots/old").mkdir(parents=True)
    result = diff(one, other)
    assert result.same
    some = ".git/objects, .git/objects/0/data, .git/objects/1/data, .git/objects/2/data and 2 more"
    assert [note.partition(": ")[0] for note in result.notes] == [some, "plots/old/"]
    assert diff(one, packed(other, tmp_path / "b.zip", "top/")).notes[0] == result.notes[0]
    notes = diff(one, one / "optimizer.pt").notes[-2:]
    assert [note.partition(": ")[0] for note in notes] == [".git/objects", "both/, plots/old/"]


def test_links_are_compared_by_where_they_lead(build):
    one, other = build.hf_trainer("one"), build.hf_trainer("other")
    for folder, target in ((one, "optimizer.pt"), (other, "scheduler.pt")):
        (folder / "latest").symlink_to(target)
        (folder / "loop").symlink_to("loop")
    assert diff(one, other).changed == (Change("latest", "object", "a link to optimizer.pt", "a link to scheduler.pt"),)
    assert diff(one, one).same


def test_what_stands_in_the_trees_of_files_is_told_with_the_file(build):
    one, other = build.hf_trainer("one"), build.hf_trainer("other")
    tree = torch.load(other / "optimizer.pt", map_location="cpu", weights_only=False)
    tree["param_groups"][0]["lr"] = 0.5
    build.save(other / "optimizer.pt", tree, "cuda:0")
    build.save(other / "scheduler.pt", dict(reversed(torch.load(other / "scheduler.pt").items())))
    changes = {change.name: (change.source, change.target) for change in diff(one, other).changed}
    assert changes.pop("optimizer.pt.param_groups.0.lr") == ("0.001", "0.5")
    assert list(changes) == ["the order in scheduler.pt"]


def test_records_inside_of_files_are_told_with_the_file(tmp_path):
    for name, format_name in (("one", "pt"), ("other", "np")):
        (tmp_path / name).mkdir()
        safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / name / "m.safetensors", {"format": format_name})
    (change,) = diff(tmp_path / "one", tmp_path / "other").changed
    assert (change.name, change.what) == ("m.safetensors.__metadata__", "object")


def test_a_checkpoint_that_only_one_directory_has(build):
    one, other = build.hf_trainer("one"), build.hf_trainer("other")
    (other / "scheduler.pt").unlink()
    (one / "rng_state.pth").unlink()
    result = diff(one, other)
    assert (result.removed, result.added) == ((), ("rng_state.pth.cpu",))
    assert result.changed == (
        Change("scheduler.pt", "object", "a checkpoint (torch-zip)", "absent"),
        Change("rng_state.pth", "object", "absent", "a checkpoint (torch-zip)"),
    )


def test_ranks_that_only_one_run_has_are_no_counterparts_of_others(build):
    result = diff(build.deepspeed("one", ranks=2), build.deepspeed("other", ranks=3))
    assert (result.removed, result.uncompared, result.notes) == ((), (), ())
    assert len(result.added) == 16
    assert all("rank_2" in name or "rank_02" in name for name in result.added)


# --- the same model in other files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "others"), [(2, 4), (4, 2), (1, 2)])
def test_a_model_in_other_shards_is_compared_by_its_names(build, shards, others):
    one, other = build.hf_trainer("one", shards=shards), build.hf_trainer("other", shards=others)
    result = diff(one, other)
    assert result.same
    assert result.tensors == len(loaded(one))
    assert all(f".bin of {side}" in result.notes[0] for side in (one, other))
    assert [note.partition(": ")[0] for note in result.notes[1:]] == ["pytorch_model.bin.index.json"]
    last = max(other.glob("pytorch_model*.bin"))
    name = list(torch.load(last, map_location="cpu"))[-1]
    change_one(last, name)
    values = [change for change in diff(one, other).changed if change.what == "value"]
    assert [(change.name.endswith(f".bin.{name}"), change.gap.max_abs) for change in values] == [
        (True, pytest.approx(2))
    ]
    assert values[0].name.startswith("pytorch_model")


def test_shards_of_the_same_names_that_share_the_tensors_out_otherwise(build, tmp_path):
    one, other = build.sharded("one"), build.sharded("other")
    shards = sorted(other.glob("*.bin"))
    first, second = (torch.load(shard, map_location="cpu") for shard in shards)
    name = next(iter(second))
    second["epoch"] = 1
    build.save(sorted(one.glob("*.bin"))[1], second, "cuda:0")
    build.save(shards[0], first | {name: second.pop(name)}, "cuda:0")
    build.save(shards[1], second | {"epoch": 2}, "cuda:0")
    result = diff(one, other)
    assert result.changed == (Change(f"{shards[1].name}.epoch", "object", "1", "2"),)
    assert result.tensors == 4
    assert len(result.notes) == 2


def test_a_file_against_the_shards_of_it(build, tmp_path):
    folder = build.sharded(device="cpu")
    whole = {name.partition(".bin.")[2]: tensor for name, tensor in loaded(folder).items()}
    torch.save(whole, tmp_path / "whole.pt")
    safetensors.torch.save_file(whole, tmp_path / "whole.safetensors")
    result = diff(tmp_path / "whole.pt", folder)
    assert result.same
    assert result.tensors == 4
    assert result.notes[0].startswith(f"config.json, pytorch_model.bin.index.json of {folder}: ")
    torch.save(collections.OrderedDict(whole), tmp_path / "ordered.pt")
    assert diff(folder, tmp_path / "ordered.pt").same  # the class of a state_dict is in no shard
    plain = diff(folder, tmp_path / "whole.safetensors")
    assert plain.same
    assert " 4 tensors" in plain.notes[-1]
    torch.save(whole | {"more": torch.ones(1)}, tmp_path / "more.pt")
    assert diff(tmp_path / "more.pt", folder).removed == ("more",)
    assert diff(folder, tmp_path / "more.pt").added == ("more",)


def test_what_gathered_files_hold_besides_tensors_is_compared(build, tmp_path):
    folder = build.sharded(device="cpu")
    whole = {name.partition(".bin.")[2]: tensor for name, tensor in loaded(folder).items()}
    torch.save(whole | {"epoch": 3}, tmp_path / "whole.pt")
    assert [one.name for one in diff(tmp_path / "whole.pt", folder).changed] == ["epoch"]
    torch.save(torch.nn.Linear(1, 1), tmp_path / "whole.pt")
    assert not diff(tmp_path / "whole.pt", folder).same


def test_metadata_that_all_shards_have_alike_needs_no_note(build, tmp_path):
    for name, count in (("one", 2), ("other", 1)):
        (tmp_path / name).mkdir()
        for place in range(count):
            tensors = {str(key): torch.ones(key + 1) for key in range(4) if key % count == place}
            safetensors.torch.save_file(tensors, tmp_path / name / f"{place}-{count}.safetensors", {"format": "pt"})
    result = diff(tmp_path / "one", tmp_path / "other")
    assert result.same
    assert len(result.notes) == 1


def test_a_file_under_another_name_is_compared_with_its_tree(tmp_path):
    for folder, name, epoch in (("one", "a.pt", 1), ("other", "b.pt", 2)):
        (tmp_path / folder).mkdir()
        torch.save({"w": torch.ones(2), "epoch": epoch}, tmp_path / folder / name)
    result = diff(tmp_path / "one", tmp_path / "other")
    assert result.changed == (Change("a.pt.epoch", "object", "1", "2"),)
    assert len(result.notes) == 1
    result = diff(tmp_path / "one" / "a.pt", tmp_path / "other")
    assert result.changed == (Change("epoch", "object", "1", "2"),)


def test_names_that_several_files_have_are_ambiguous(tmp_path):
    torch.save({"w": torch.ones(2), "only": torch.ones(1)}, tmp_path / "one.pt")
    for place in range(6):
        torch.save({"w": torch.full((2,), float(place))}, tmp_path / f"{place}.pt")
    (tmp_path / "many").mkdir()
    for file in tmp_path.glob("?.pt"):
        file.rename(tmp_path / "many" / file.name)
    result = diff(tmp_path / "one.pt", tmp_path / "many")
    files = f"0.pt, 1.pt, 2.pt, 3.pt and 2 more of {tmp_path / 'many'}"
    (uncompared,) = result.uncompared
    assert uncompared.name == "w"
    assert all(f"in {place}" in uncompared.reason for place in (tmp_path / "one.pt", files))
    assert (result.removed, result.added, result.tensors) == (("only",), (), 0)
    assert not result.same


def test_a_folder_of_another_step_is_no_counterpart(build):
    for name, steps in (("one", (500, 1000)), ("other", (500, 1500))):
        for step in steps:
            build.hf_trainer(f"{name}/checkpoint-{step}")
    result = diff(build.root / "one", build.root / "other")
    assert result.notes == ()
    assert {name.partition("/")[0] for name in result.removed} == {"checkpoint-1000"}
    assert {name.partition("/")[0] for name in result.added} == {"checkpoint-1500"}


# --- archives --------------------------------------------------------------------------------------------------------


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", ["a.tar", "a.zip", "deflated.zip"])
@pytest.mark.parametrize("top", ["", "run/", "./run/"])
def test_an_archive_of_a_directory_is_the_same(build, tmp_path, name, top):
    folder = build.hf_trainer()
    method = zipfile.ZIP_DEFLATED if name == "deflated.zip" else zipfile.ZIP_STORED
    archive = packed(folder, tmp_path / name, top, method)
    for pair in ((folder, archive), (archive, folder), (archive, archive)):
        result = diff(*pair)
        assert result.same
        assert (result.tensors, result.notes) == (len(loaded(folder)), ())


@pytest.mark.parametrize("name", ["a.tar", "a.zip"])
def test_an_archive_of_a_folder_is_the_same_as_what_it_is_unpacked_into(build, tmp_path, name):
    folder = build.hf_trainer("checkpoint-5")
    packed(folder, tmp_path / name, "checkpoint-5/")
    (tmp_path / "above").mkdir()
    shutil.copytree(folder, tmp_path / "above" / "checkpoint-5")
    for pair in ((tmp_path / name, tmp_path / "above"), (tmp_path / "above", tmp_path / name)):
        result = diff(*pair)
        assert result.same
        assert result.tensors == len(ckptmove.inspect(folder).inventory.tensors)
    assert diff(tmp_path / name, folder).same


def test_two_archives_that_differ(build, tmp_path):
    one, other = build.hf_trainer("one", device="cpu"), build.hf_trainer("other", device="cpu")
    change_one(other / "optimizer.pt", "state.0.exp_avg")
    (other / "vocab.txt").write_text("b")
    first, second = packed(one, tmp_path / "one.tar", "one/"), packed(other, tmp_path / "other.zip", "other/")
    value, vocab = diff(first, second).changed
    assert (value.name, value.what, value.gap.max_abs) == (
        "one/optimizer.pt.state.0.exp_avg",
        "value",
        pytest.approx(2),
    )
    assert (vocab.name, vocab.what) == ("one/vocab.txt", "object")
    value, vocab = diff(one, second).changed
    assert (value.name, vocab.name) == ("optimizer.pt.state.0.exp_avg", "vocab.txt")


def test_a_file_against_an_archive_of_it(build, tmp_path):
    folder = tmp_path / "one"
    torch.save({"w": torch.ones(2), "epoch": 1}, tmp_path / "policy.pth")
    folder.mkdir()
    torch.save({"w": torch.ones(2), "epoch": 2}, folder / "policy.pth")
    result = diff(tmp_path / "policy.pth", packed(folder, tmp_path / "one.zip"))
    assert result.changed == (Change("epoch", "object", "1", "2"),)


def test_a_large_member_that_is_no_checkpoint_is_read_as_a_stream(build, tmp_path, monkeypatch):
    folder = build.hf_trainer()
    (folder / "corpus.txt").write_text("word " * 400_000)
    archive = packed(folder, tmp_path / "a.zip", method=zipfile.ZIP_DEFLATED)
    monkeypatch.setattr("ckptmove.opening.zip_members.MOST_INFLATED_BYTES", 1_000_000)
    assert diff(folder, archive).same


# --- unreadable content ----------------------------------------------------------------------------------------------


def flip(path, needle):
    data = bytearray(path.read_bytes())
    data[data.index(needle)] ^= 1
    path.write_bytes(data)


def test_a_shard_that_is_missing(build, tmp_path):
    one, other = build.sharded("one"), build.sharded("other")
    max(other.glob("*.bin")).unlink()
    for pair in ((one, other), (other, one)):
        with pytest.raises(MissingShard) as caught:
            diff(*pair)
        assert caught.value.path == str(other / "pytorch_model.bin.index.json")


def test_a_shard_that_is_damaged(build):
    one, other = build.sharded("one"), build.sharded("other")
    shard = max(other.glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(DamagedArchive) as caught:
        diff(one, other)
    assert caught.value.path == str(shard)
    shard.write_bytes(b"")
    with pytest.raises(NotACheckpoint, match="an empty file"):
        diff(one, other)


def test_a_tensor_that_is_not_all_there_is_not_compared(build, tmp_path):
    one, other = build.sharded("one", device="cpu"), build.sharded("other", device="cpu")
    shard = max(other.glob("*.bin"))
    with zipfile.ZipFile(shard) as source, zipfile.ZipFile(tmp_path / "cut", "w") as target:
        for name in source.namelist():
            if not name.endswith("/data/0"):
                target.writestr(name, source.read(name))
    (tmp_path / "cut").rename(shard)
    (lost,) = diff(one, other).uncompared
    assert lost == Uncompared(f"{shard.name}.1.weight", f"missing or cut off in {shard}")
    with zipfile.ZipFile(one / shard.name) as source, zipfile.ZipFile(shard, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    found = diff(one, other).uncompared
    assert {change.reason for change in found} == {f"compressed in {shard}: convert stores it uncompressed"}


def test_directories_without_a_checkpoint_and_links_that_lead_out(build, tmp_path):
    one = build.hf_trainer()
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmptyDirectory):
        diff(one, tmp_path / "empty")
    (one / "out").symlink_to(tmp_path)
    with pytest.raises(NotACheckpoint, match="a symbolic link out of its directory"):
        diff(one, one)


def test_links_in_a_circle_are_no_way_in(build):
    one = build.hf_trainer("one")
    (one / "again").symlink_to(".", target_is_directory=True)
    (one / "circle").symlink_to("spiral")
    (one / "spiral").symlink_to("circle")
    assert diff(one, one).same


@pytest.mark.parametrize("name", ["optimizer.pt", "vocab.txt"])
def test_a_compressed_member_that_is_damaged(build, tmp_path, name):
    folder = build.hf_trainer()
    (folder / "vocab.txt").write_bytes(os.urandom(400))
    archive = packed(folder, tmp_path / "a.zip", method=zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(archive) as members:
        member = members.getinfo(name)
    data = bytearray(archive.read_bytes())
    data[member.header_offset + 30 + len(name) + member.compress_size // 2] ^= 0x10
    archive.write_bytes(data)
    with pytest.raises(CrcMismatch):
        diff(folder, archive)


def test_archives_that_must_be_unpacked(build, tmp_path, monkeypatch):
    folder = build.hf_trainer()
    archive = packed(folder, tmp_path / "a.zip", method=zipfile.ZIP_DEFLATED)
    monkeypatch.setattr("ckptmove.opening.zip_members.MOST_INFLATED_BYTES", 100)
    with pytest.raises(MustBeUnpacked):
        diff(folder, archive)


def test_limits_hold_for_both_sides(build):
    one, other = build.hf_trainer("one"), build.hf_trainer("other")
    (other / "more").mkdir()
    for place in range(20):
        (other / "more" / str(place)).write_text("")
    with pytest.raises(LimitExceeded) as caught:
        diff(one, other, limits=Limits(entries=20))
    assert caught.value.path == str(other)


# --- files while they are compared -----------------------------------------------------------------------------------


def test_a_file_that_is_read_stays_open(build, monkeypatch):
    monkeypatch.setattr(open_files, "_MOST_OPEN", 2)
    folder = str(build.sharded("one", shards=4))
    with open_checkpoint(folder) as checkpoint, ExitStack() as reads:
        files = open_files.OpenFiles(checkpoint.listing)
        reads.callback(files.close)
        paths = [file.path for file in checkpoint.listing.files]
        sources = [reads.enter_context(files.reading(path)) for path in paths]
        for path, source in zip(paths, sources, strict=True):
            assert source.read(0, 1) == files.source(path).read(0, 1)


def test_a_thread_reads_no_further_once_another_fails(build):
    met, ended = threading.Barrier(2, timeout=60), []
    with open_checkpoint(str(build.sharded("one", shards=2))) as checkpoint, ExitStack() as reads:
        files = open_files.OpenFiles(checkpoint.listing)
        reads.callback(files.close)
        source = files.source(checkpoint.listing.files[0].path)

        def call(item):
            met.wait()
            if item:
                raise ValueError(item)
            for _ in range(300_000):
                source.read(0, 1)
            ended.append(item)

        with pytest.raises(ValueError, match="1"):
            Workers([0, 1]).run(call, 2)
    assert not ended


def test_no_more_than_a_few_files_are_open(build, monkeypatch):
    monkeypatch.setattr(open_files, "_MOST_OPEN", 2)
    opened, most, real = set(), [0], builtins.open

    def counting(path, *rest, **options):
        stream = real(path, *rest, **options)
        if "one" in str(path):
            opened.add(stream)
            most.append(sum(not one.closed for one in opened))
        return stream

    monkeypatch.setattr(builtins, "open", counting)
    one, other = build.sharded("one", shards=4), build.sharded("other", shards=4)
    opened.clear()
    most.clear()
    assert diff(one, other).same
    assert max(most) <= 3
    assert all(stream.closed for stream in opened)


def test_a_file_that_is_replaced_meanwhile_is_refused(build, monkeypatch):
    one, other = build.sharded("one"), build.sharded("other")
    shard = max(other.glob("*.bin"))

    def progress(done, total):
        if not done or done == total:
            return
        shutil.copy(shard, shard.with_name("copy"))
        shard.with_name("copy").replace(shard)

    with pytest.raises(SourceChanged) as caught:
        diff(one, other, progress=progress)
    assert caught.value.path == str(shard)


def test_a_file_that_vanishes_meanwhile_is_an_error(build, tmp_path):
    one, other = build.hf_trainer("one"), build.hf_trainer("other")
    with pytest.raises(UnreadableInput):
        diff(one, other, progress=lambda *_figures: (other / "vocab.txt").unlink(missing_ok=True))


def test_progress_counts_the_tensors_of_all_files(build):
    folder = build.hf_trainer()
    told = []
    diff(folder, folder, progress=lambda *figures: told.append(figures))
    total = sum(tensor.nbytes for tensor in ckptmove.inspect(folder).inventory.tensors)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_memory_does_not_hang_on_the_size_of_tensors(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.zeros(4_000_000)}, tmp_path / name / "model.pt")
    torch.save({"w": torch.zeros(4_000_000)}, tmp_path / "whole.pt")
    diff(tmp_path / "one", tmp_path / "other")
    tracemalloc.start()
    try:
        assert diff(tmp_path / "one", tmp_path / "other").same
        assert diff(tmp_path / "whole.pt", tmp_path / "other").same
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000  # a quarter of the tensor


@pytest.mark.unmeasured
@pytest.mark.parametrize("form", ["folder", "deflated.zip"])
def test_no_more_than_two_trees_are_in_memory(tmp_path, form):
    def peak(count):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        torch.save({"w": torch.ones(2), "big": [0] * 4_000}, folder / "0.pt")
        for place in range(1, count):
            shutil.copy(folder / "0.pt", folder / f"{place}.pt")
        method = zipfile.ZIP_DEFLATED if form == "deflated.zip" else zipfile.ZIP_STORED
        run = folder if form == "folder" else packed(folder, tmp_path / f"{count}{form}", method=method)
        tracemalloc.start()
        try:
            assert diff(run, run).same
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1)
    assert peak(5) < 1.5 * peak(2)


def test_a_tree_is_read_of_what_was_listed(build):
    one, other = build.hf_trainer("one"), build.hf_trainer("other")
    file = other / "pytorch_model.bin"

    def progress(done, total):
        if done == total:
            shutil.copy(file, file.with_name("copy"))
            file.with_name("copy").replace(file)

    with pytest.raises(SourceChanged) as caught:
        diff(one, other, progress=progress)
    assert caught.value.path == str(file)


def test_a_message_names_the_side_that_it_is_about(build, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.safetensors.index.json").write_text(json.dumps([]))
    with pytest.raises(DamagedArchive) as caught:
        diff(build.hf_trainer(), tmp_path / "bad")
    assert caught.value.path == str(tmp_path / "bad" / "model.safetensors.index.json")


def test_the_gap_between_two_cast_directories(tmp_path):
    for name, dtype in (("one", torch.float64), ("other", torch.float32)):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.tensor([0.5, 1.0]).to(dtype) + (name == "other")}, tmp_path / name / "w.pt")
    dtype, value = diff(tmp_path / "one", tmp_path / "other").changed
    assert (dtype.what, value.gap) == ("dtype", Gap(1.0, 2 / 3))
