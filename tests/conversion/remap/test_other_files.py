"""Files of a directory or an archive that are not checkpoints: copied, left out, and compared with the original."""

from __future__ import annotations

import io
import json
import stat

import pytest
import remaps
import torch
from distributed_checkpoints import Distributed
from safetensors.torch import load_file, save_file

import ckptmove
from ckptmove.conversion.remap.errors import NotRemappable
from ckptmove.errors import UsageError

MODEL = {"a.bias": torch.arange(3.0), "a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.arange(4)}
NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def shards(folder, metadata=({"format": "pt"}, {"format": "pt"})):
    """Two shards of a model with their index."""
    folder.mkdir()
    items = list(MODEL.items())
    weight_map = {}
    for name, part, own in zip(NAMES, (dict(items[:2]), dict(items[2:])), metadata, strict=True):
        save_file(part, folder / name, own)
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 92}, "weight_map": weight_map}))
    return folder


def paths(folder):
    return sorted(one.relative_to(folder).as_posix() for one in folder.rglob("*"))


# --- shards that are written again ------------------------------------------------------------------------------


def other_bits(folder):
    with (folder / NAMES[1]).open("rb+") as file:
        file.seek(-1, io.SEEK_END)
        file.write(b"\1")


def other_key(folder):
    found = load_file(folder / NAMES[1])
    key = min(found)
    save_file({f"{one}.x" if one == key else one: tensor for one, tensor in found.items()}, folder / NAMES[1])


FORGERIES = [other_bits, other_key]


@pytest.mark.unmeasured
@pytest.mark.parametrize("options", [{}, {"add_prefix": "x."}], ids=["none", "prefix"])
@pytest.mark.parametrize("size", [60, 70], ids=["same", "other"])
@pytest.mark.parametrize("forge", FORGERIES)
def test_shards_with_the_names_of_the_old_ones_are_proven(options, size, forge, tmp_path, compared):
    """New shards all have the metadata of all old ones."""
    source = shards(tmp_path / "in", ({"format": "pt", "step": "1"}, {"format": "pt", "more": "2"}))
    if size == 70:  # as large as two other tensors
        save_file({"a.bias": MODEL["a.bias"]}, source / NAMES[0], {"format": "pt", "step": "1"})
        rest = {key: MODEL[key] for key in ("a.weight", "b")}
        save_file(rest, source / NAMES[1], {"format": "pt", "more": "2"})
        weight_map = dict.fromkeys(rest, NAMES[1]) | {"a.bias": NAMES[0]}
        (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (source / "config.json").write_text("{}")
    output = tmp_path / "out"
    ckptmove.convert(source, output=output, shard_size=size, **options)
    assert paths(output) == paths(source)
    assert compared(output, source, **options) == 0
    forge(output)
    assert compared(output, source, **options) > 0


@pytest.mark.parametrize("size", [60, 1000])
def test_shards_may_gain_or_lose_an_index(size, tmp_path, compared):
    if size == 60:
        source = shards(tmp_path / "in")
        (source / INDEX).unlink()
    else:
        source = tmp_path / "in"
        source.mkdir()
        save_file(MODEL, source / "model.safetensors", {"format": "pt"})
        (source / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(MODEL, "model.safetensors")}))
    output = tmp_path / "out"
    ckptmove.convert(source, output=output, shard_size=size)
    assert (output / INDEX).exists() == (size == 60)
    assert compared(output, source) == 0


def test_files_that_keep_their_names_are_not_taken_for_shards(tmp_path, compared):
    source = shards(tmp_path / "in", ({"step": "1"}, {"step": "2"}))
    output = tmp_path / "out"
    ckptmove.convert(source, output=output, add_prefix="x.")
    assert compared(output, source, add_prefix="x.") == 0


def test_two_tables_are_not_taken_for_the_shards_of_one(tmp_path, compared):
    source = tmp_path / "in"
    source.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        save_file(MODEL, source / name)
    assert compared(shards(tmp_path / "out"), source) > 0


# --- files next to new shards -----------------------------------------------------------------------------------


def busy(folder):
    """Shards among other files, folders and links."""
    shards(folder)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "deep" / "notes.txt").write_text("a")
    (folder / "sub" / "run.sh").write_text("b")
    (folder / "sub" / "run.sh").chmod(0o750)
    (folder / "sub").chmod(0o700)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("c")
    (folder / "empty").mkdir()
    (folder / "c.json").symlink_to("config.json")
    (folder / "sub" / "up.json").symlink_to("../config.json")
    (folder / "folder").symlink_to("sub")
    (folder / "nowhere").symlink_to("gone")
    (folder / "links").mkdir()
    (folder / "old.safetensors.index.json").symlink_to(INDEX)
    (folder / "links" / "model").symlink_to(f"../{NAMES[0]}")
    return folder


@pytest.mark.parametrize("size", [60, 1000])
def test_everything_else_is_copied(size, tmp_path, compared):
    source, output = busy(tmp_path / "in"), tmp_path / "out"
    done = []
    result = ckptmove.convert(source, output=output, shard_size=size, progress=lambda *count: done.append(count))
    gone = {*NAMES, INDEX, "old.safetensors.index.json", "links", "links/model"} if size == 1000 else set()
    assert set(paths(output)) == set(paths(source)) - gone | ({"model.safetensors"} if gone else set())
    for path in ("sub/run.sh", "sub"):
        assert stat.S_IMODE((output / path).stat().st_mode) == stat.S_IMODE((source / path).stat().st_mode)
    assert (output / "sub" / "up.json").read_text() == "{}"
    assert any("links/model" in note for note in result.notes) == bool(gone)
    assert done[-1][0] == done[-1][1]
    assert done[-1][0] == sum(one.lstat().st_size for one in output.rglob("*") if stat.S_ISREG(one.lstat().st_mode))
    assert [one for one, _ in done] == sorted(one for one, _ in done)
    assert compared(output, source) == 0


@pytest.mark.parametrize("suffix", [".zip", ".tar"])
@pytest.mark.parametrize("top", ["", "run/"])
def test_an_archive_becomes_shards(suffix, top, tmp_path, compared):
    members = {"model.pth": remaps.zipped(MODEL), "config.json": b"{}", "sub/notes.txt": b"a", ".git/HEAD": b"c"}
    hidden = {} if suffix == ".tar" else {"__MACOSX/x": b"b"}
    source = remaps.archive(
        tmp_path / f"deflated{suffix}", {top + name: data for name, data in members.items()} | hidden
    )
    output = tmp_path / "out"
    ckptmove.convert(source, output=output, shard_size=1000)
    assert set(paths(output)) >= {"config.json", "model.safetensors", "sub", "sub/notes.txt"}
    assert (output / ".git" / "HEAD").read_bytes() == b"c"
    assert not (output / "__MACOSX").exists()
    assert compared(output, source) == 0


@pytest.mark.parametrize("name", ["../notes.txt", "/notes.txt", "a/../../notes.txt"])
def test_no_member_is_written_outside(name, tmp_path):
    source = remaps.archive(tmp_path / "deflated.zip", {"model.pth": remaps.zipped(MODEL), name: b"a"})
    for dry_run in (True, False):
        with pytest.raises(NotRemappable):
            ckptmove.convert(source, output=tmp_path / "out", shard_size=1000, dry_run=dry_run)
    assert paths(tmp_path) == ["deflated.zip"]


# --- files that are left out ------------------------------------------------------------------------------------


def training(folder):
    """A directory with an optimizer, and links to its files."""
    tree = remaps.run(objects=False)
    (folder / "state" / "links").mkdir(parents=True)
    torch.save(tree["model"], folder / "model.pth")
    torch.save(tree["optimizer"], folder / "state" / "optimizer.pt")
    (folder / "state" / "links" / "own").symlink_to("../optimizer.pt")
    (folder / "latest.pt").symlink_to("state/optimizer.pt")
    (folder / "all").symlink_to("state")
    (folder / "best.pth").symlink_to("model.pth")
    (folder / "nowhere").symlink_to("gone")
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("options", [{"drop": "optimizer"}, {"only": "model"}], ids=["drop", "only"])
def test_links_and_folders_of_a_dropped_file_are_left_out(options, tmp_path, compared):
    source, output = training(tmp_path / "in"), tmp_path / "out"
    reason = next(iter(options))
    dry = ckptmove.convert(source, output=output, dry_run=True, **options)
    result = ckptmove.convert(source, output=output, **options)
    assert result.plan == dry.plan
    lost = ["all", "latest.pt", "state/links/own"]
    assert [(one.name, one.reason) for one in result.plan.dropped if not one.tensors] == [(one, reason) for one in lost]
    assert paths(output) == ["best.pth", "empty", "model.pth", "nowhere"]
    assert compared(output, source, **options) == 0


def test_a_folder_with_another_file_stays(tmp_path, compared):
    source, output = training(tmp_path / "in"), tmp_path / "out"
    (source / "state" / "notes.txt").write_text("a")
    ckptmove.convert(source, output=output, drop="optimizer")
    assert paths(output) == ["all", "best.pth", "empty", "model.pth", "nowhere", "state", "state/notes.txt"]
    assert compared(output, source, drop="optimizer") == 0


def test_a_distributed_checkpoint_is_left_out(tmp_path, compared):
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    Distributed.save(source / "dist", MODEL)
    torch.save({"x": torch.ones(2)}, source / "dist" / "x.pth")
    torch.save({"y": torch.ones(2)}, source / "y.pth")
    options = {"drop": "dist"}
    ckptmove.convert(source, output=output, **options)
    assert paths(output) == ["dist", "dist/x.pth", "y.pth"]
    assert compared(output, source, **options) == 0


def test_one_value_does_not_become_a_directory(tmp_path):
    with pytest.raises(UsageError):
        ckptmove.convert(training(tmp_path / "in"), output=tmp_path / "out", as_root="model.pth")
    assert not (tmp_path / "out").exists()
