"""Directories through the command line: renderings, exit codes, hints."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zipfile

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from older_torch import IN_ONE_PROCESS

import ckptmove
from ckptmove.errors import DamagedArchive


@pytest.fixture
def run(bench):
    """A directory of two checkpoints, and of two files that are none."""
    folder = bench / "run"
    (folder / "logs").mkdir(parents=True)
    shutil.copy(bench / "run.pth", folder / "epoch_2.pth")
    shutil.copy(bench / "dragged.pth", folder / "epoch_1.pth")
    (folder / "config.json").write_text("{}")
    (folder / "logs" / "log.txt").write_text("hello")
    return folder


def test_people_see_every_file_with_its_role(say, run) -> None:
    said = say("inspect", "run")
    assert said.code == 1
    lines = said.out.splitlines()
    assert lines[0] == "run"
    assert lines[1].startswith("directory, other, ")
    assert lines[2].endswith("AdamW")
    assert [" ".join(line.split()) for line in lines[4:7]] == [
        "file roles layout devices tensors size",
        "epoch_1.pth model, optimizer, rng, scheduler, scaler plain cuda:0 18 16.6 KiB",
        "epoch_2.pth model, optimizer, scheduler plain cuda:3, cpu 16 6.8 KiB",
    ]
    assert "  at  epoch_1.pth.rng.torch" in lines
    assert any("2 separate checkpoints" in line for line in lines)
    assert "D101" not in said.out  # nobody uses both in one forward pass
    assert say("convert", "run.pth", "--to", "cpu", "--keep", "model.0*", "-o", "run/epoch_3.pth").code == 0
    assert "D101" in say("inspect", "run").out  # but of these, one has its model on two devices
    (run / "epoch_3.pth").unlink()
    assert lines[-1] == "1 error, 1 warning, 1 note"
    assert said.only_next == ["inspect", "run/epoch_2.pth"]


def test_programs_see_them_too(ask, run) -> None:
    (checkpoint,) = ask("inspect", "run")["checkpoints"]
    assert (checkpoint["container"], checkpoint["layout"]) == ("directory", "other")
    assert checkpoint["size_bytes"] == sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    assert checkpoint["files"][1] == {
        "path": "epoch_2.pth",
        "roles": ["model", "optimizer", "scheduler"],
        "container": "torch-zip",
        "layout": "plain",
        "size_bytes": (run / "epoch_2.pth").stat().st_size,
        "tensors": 16,
        "devices": ["cuda:3", "cpu"],
    }
    assert checkpoint["tensors"][0]["name"] == "epoch_1.pth.model.0.weight"
    assert ask("inspect", "run.pth")["checkpoints"][0]["files"] == []


def test_a_long_list_of_files_is_cut(say, run) -> None:
    for number in range(30):
        shutil.copy(run / "epoch_2.pth", run / f"rank_{number:02}.pth")
    assert "+8 more (-v names them)" in say("inspect", "run").out.splitlines()
    assert "rank_29.pth" in say("inspect", "run", "-v").out


@pytest.mark.parametrize("path", ["run/", "./run", "run/../run"])
def test_a_directory_may_be_written_in_several_ways(ask, run, path) -> None:
    (checkpoint,) = ask("inspect", path)["checkpoints"]
    assert checkpoint["path"] == path
    assert [file["path"] for file in checkpoint["files"]] == ["epoch_1.pth", "epoch_2.pth"]


def test_a_directory_and_a_file_side_by_side(ask, run) -> None:
    document = ask("inspect", "run*")
    assert [checkpoint["container"] for checkpoint in document["checkpoints"]] == ["directory", "torch-zip"]


def test_a_healthy_directory_is_verified_next(say, bench) -> None:
    (bench / "ok").mkdir()
    shutil.copy(bench / "run.pth", bench / "ok")
    said = say("inspect", "ok", "--select", "O")
    assert (said.code, said.only_next) == (0, ["verify", "ok"])


def test_the_tree_has_every_file(say, run) -> None:
    lines = say("inspect", "run", "--tree", "-q").out.splitlines()
    assert "directory (4)" in lines
    assert "  config.json: a text file" in lines
    assert "  logs/log.txt: a text file" in lines


def test_what_is_refused_is_one_line_and_a_hint(ask, say, bench, run) -> None:
    (bench / "empty").mkdir()
    error = ask("inspect", "empty")["error"]
    assert (error["kind"], error["exit_code"]) == ("empty-directory", 3)
    os.mkfifo(run / "pipe")
    said = say("inspect", "run")
    assert (said.code, said.out) == (3, "")
    error, hint = said.err.splitlines()
    assert error.startswith("error: run/pipe: ")
    assert error.endswith(": a named pipe")
    assert hint.startswith("hint: ")


def test_several_checkpoints_in_a_directory_are_said_to_be_so(say, bench) -> None:
    for step in (500, 1000, 99):
        (bench / "runs" / f"checkpoint-{step}").mkdir(parents=True)
        shutil.copy(bench / "run.pth", bench / "runs" / f"checkpoint-{step}")
    said = say("inspect", "runs")
    assert "3 separate checkpoints" in said.out
    assert said.only_next == ["inspect", "runs/checkpoint-1000"]
    for step in (500, 99):
        shutil.rmtree(bench / "runs" / f"checkpoint-{step}")
    said = say("inspect", "runs")
    assert "separate" not in said.out
    assert said.only_next == ["verify", "runs"]


@pytest.fixture
def shards(bench):
    """A model in two files and their index, as ``save_pretrained`` leaves them."""
    (bench / "sh").mkdir()
    names = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    for key, name in enumerate(names):
        safetensors.torch.save_file({str(key): torch.ones(2)}, bench / "sh" / name)
    index = {"metadata": {"total_size": 16}, "weight_map": {str(key): name for key, name in enumerate(names)}}
    (bench / "sh" / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return bench / "sh"


@pytest.mark.parametrize("words", [["inspect"], ["verify"], ["convert", "--to", "cpu"]])
def test_an_index_points_to_its_directory(say, shards, words) -> None:
    said = say(*words, "sh/model.safetensors.index.json")
    assert said.code == 3
    error, hint = said.err.splitlines()
    assert error.startswith("error: sh/model.safetensors.index.json: ")
    assert hint.endswith(": ckptmove inspect sh")
    assert say("inspect", "sh").code == 0


def test_a_shard_that_is_missing_is_asked_for(say, shards) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()
    said, index = say("inspect", "sh"), "sh/model.safetensors.index.json"
    assert said.code == 3
    error, hint = said.err.split("\n")[-3:-1]
    assert error.startswith(f"error: {index}: ")
    assert error.endswith(": 'model-00002-of-00002.safetensors'")
    assert " into sh; " in hint


# --- convert ----------------------------------------------------------------------------------------------------------


def test_a_directory_is_converted_and_looked_at(say, run) -> None:
    said = say("convert", "run", "--to", "cpu")
    assert said.code == 0
    assert said.out.splitlines()[-1].startswith("wrote run.cpu: ")
    assert said.only_next == ["verify", "run.cpu", "--to", "cpu"]
    assert say("inspect", "run.cpu", "--expect", "cpu", "--select", "D").code == 0
    assert say("convert", "run", "--map", "cuda:*=mps", "-o", "mapped").only_next == ["verify", "mapped"]


def test_programs_get_one_plan(ask, run, bench) -> None:
    dry = ask("convert", "run", "--to", "cpu", "--dry-run")
    done = ask("convert", "run", "--to", "cpu")
    assert dry["plan"] == done["plan"]
    assert (dry["output"], done["output"]) == (None, "run.cpu")
    first = done["plan"]["edits"][0]
    assert first["names"] == ["epoch_1.pth.model.0.weight"]
    assert first["storage"] == "epoch_1.pth/0"
    assert done["bytes_copied"] == sum(path.stat().st_size for path in (bench / "run.cpu").rglob("*") if path.is_file())


def test_ranks_are_gathered_by_map(say, ask, run) -> None:
    assert say("convert", "run", "--map", "cuda:*=cuda:0", "-q").code == 0
    (checkpoint,) = ask("inspect", "run.moved")["checkpoints"]
    assert {device for file in checkpoint["files"] for device in file["devices"]} == {"cuda:0", "cpu"}


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (["-o", "out"], "output-exists", 4),
        (["-o", "out", "--force"], "output-holds-more", 4),
        (["-o", "run/inner"], "output-is-source", 4),
        (["-o", "gone/out"], "write-failed", 5),
        (["-o", "plain", "--force"], "write-failed", 5),
    ],
)
def test_what_is_not_written_is_one_error(ask, bench, run, words, kind, code) -> None:
    (bench / "out").mkdir()
    (bench / "out" / "thesis.txt").touch()
    (bench / "plain").touch()
    before = sorted(bench.rglob("*"))
    error = ask("convert", "run", "--to", "cpu", *words)["error"]
    assert (error["kind"], error["exit_code"]) == (kind, code)
    assert error["hint"]
    assert sorted(bench.rglob("*")) == before


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


@pytest.fixture
def distributed(bench):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": {"a.weight": torch.ones(3, 4)}},
            storage_writer=dcp.FileSystemWriter(bench / "fsdp", per_thread_copy_ahead=0),
            **IN_ONE_PROCESS,
        )
    return bench / "fsdp"


def test_no_device_is_stored_in_a_distributed_checkpoint_and_people_are_told(say, distributed) -> None:
    said = say("inspect", "fsdp")
    assert said.code == 0
    lines = said.out.splitlines()
    assert re.match(r"dcp, [0-9]", lines[1])
    assert " ".join(lines[5].split()).startswith("__0_0.distcp model dcp unknown 1 ")
    assert any(line.startswith("unknown: ") for line in lines)
    assert said.only_next == ["verify", "fsdp"]


def test_there_is_nothing_to_convert_in_a_distributed_checkpoint(say, distributed) -> None:
    said = say("convert", "fsdp", "--to", "cuda:0")
    assert said.code == 0
    assert "a distributed checkpoint stores no device" in said.out + said.err
    assert not (distributed.parent / "fsdp.cuda0").exists()


def test_a_directory_with_a_distributed_part_is_verified_as_a_whole(say, bench, distributed) -> None:
    (bench / "both").mkdir()
    shutil.copy(bench / "run.pth", bench / "both")
    distributed.rename(bench / "both" / "fsdp")
    said = say("inspect", "both", "--select", "O")
    assert said.only_next == ["verify", "both"]
    assert say("convert", "both", "--to", "mps").next == ["verify", "both.mps", "--to", "mps"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_file_of_a_distributed_checkpoint_points_to_its_directory(say, distributed, name) -> None:
    said = say("inspect", f"fsdp/{name}")
    assert said.code == 3
    assert said.err.endswith(": ckptmove inspect fsdp\n")


def test_programs_read_a_distributed_checkpoint(ask, distributed) -> None:
    (checkpoint,) = ask("inspect", "fsdp")["checkpoints"]
    assert (checkpoint["container"], checkpoint["layout"]) == ("dcp", "dcp")
    assert [(one["path"], one["tensors"], one["devices"]) for one in checkpoint["files"]] == [
        ("__0_0.distcp", 1, ["unknown"])
    ]


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def swollen(path) -> None:
    """Make its pickle one of more open marks than the limits allow."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"\x80\x02" + b"(" * 20_000 + b"N.")


def test_a_file_that_cannot_be_read_does_not_hide_the_others(ask, say, run) -> None:
    cut(run / "epoch_1.pth")
    (run / "last.ckpt").write_bytes(b"")
    document = ask("inspect", "run")
    assert document["exit_code"] == 3
    assert [(error["path"], error["exit_code"]) for error in document["errors"]] == [
        ("run/epoch_1.pth", 3),
        ("run/last.ckpt", 3),
    ]
    assert document["error"] == document["errors"][0]
    (checkpoint,) = document["checkpoints"]
    assert [file["path"] for file in checkpoint["files"]] == ["epoch_2.pth"]
    assert {finding["code"] for finding in checkpoint["findings"]} >= {"D103"}
    said = say("inspect", "run")
    assert said.code == 3
    assert "epoch_2.pth" in said.out
    assert "next:" not in said.err
    assert "; 2 files" in said.out.splitlines()[-1]
    assert re.search(r"; 2 files .*\(D103\)$", say("inspect", "run", "-q").out.splitlines()[0])
    for command in (("convert", "run", "--to", "cpu"), ("verify", "run"), ("diff", "run", "run")):
        assert ask(*command)["error"]["path"] == "run/epoch_1.pth"


def test_where_no_file_can_be_read_each_has_its_error(ask, say, run) -> None:
    for path in run.glob("*.pth"):
        cut(path)
    document = ask("inspect", "run")
    assert (document["exit_code"], document["checkpoints"]) == (3, [])
    assert [error["path"] for error in document["errors"]] == ["run/epoch_1.pth", "run/epoch_2.pth"]
    assert document["error"] == document["errors"][0]
    with pytest.raises(DamagedArchive) as caught:
        ckptmove.inspect(run, keep_going=True)
    assert [type(error) for error in caught.value.others] == [DamagedArchive]
    with pytest.raises(DamagedArchive) as caught:
        ckptmove.inspect(run)
    assert caught.value.others == ()
    assert say("inspect", "run", "run.pth", "-q").out.splitlines()[0] == "run: unreadable"


def test_where_the_only_file_cannot_be_read_its_error_is_the_answer(ask, run) -> None:
    (run / "epoch_2.pth").unlink()
    cut(run / "epoch_1.pth")
    assert [error["path"] for error in ask("inspect", "run")["errors"]] == ["run/epoch_1.pth"]
    with pytest.raises(DamagedArchive):
        ckptmove.inspect(run, keep_going=True)


def test_the_gravest_of_several_errors_is_the_exit_code(ask, say, run) -> None:
    shutil.copy(run / "epoch_1.pth", run / "epoch_3.pth")
    cut(run / "epoch_1.pth")
    swollen(run / "epoch_2.pth")
    document = ask("inspect", "run")
    assert [error["exit_code"] for error in document["errors"]] == [3, 4]
    assert document["exit_code"] == 4
    assert [file["path"] for file in document["checkpoints"][0]["files"]] == ["epoch_3.pth"]
    (run / "epoch_3.pth").unlink()
    assert say("inspect", "run", "run.pth", "-q").out.splitlines()[0] == "run: refused"


def test_of_several_paths_each_gives_what_can_be_read(ask, run) -> None:
    cut(run / "epoch_1.pth")
    document = ask("inspect", "run.pth", "run", "absent.pth")
    assert document["exit_code"] == 3
    assert [checkpoint["path"] for checkpoint in document["checkpoints"]] == ["run.pth", "run"]
    assert [error["path"] for error in document["errors"]] == ["run/epoch_1.pth", "absent.pth"]


def test_a_shard_that_is_missing_does_not_hide_the_others(ask, run) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.bin", "b": "model-00002-of-00002.bin"}}
    (run / "model.bin.index.json").write_text(json.dumps(index))
    torch.save({"a": torch.ones(1)}, run / "model-00001-of-00002.bin")
    document = ask("inspect", "run")
    assert [error["kind"] for error in document["errors"]] == ["missing-shard"]
    files = [file["path"] for file in document["checkpoints"][0]["files"]]
    assert files == ["epoch_1.pth", "epoch_2.pth", "model-00001-of-00002.bin"]


def test_a_member_that_cannot_be_read_does_not_hide_the_others(ask, bench, run) -> None:
    cut(run / "epoch_1.pth")
    shutil.make_archive(str(bench / "runs"), "zip", run)
    document = ask("inspect", "runs.zip")
    assert document["exit_code"] == 3
    assert [file["path"] for file in document["checkpoints"][0]["files"]] == ["epoch_2.pth"]
