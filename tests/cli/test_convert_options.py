from __future__ import annotations

import os
import shutil
import struct
import zipfile
from pathlib import Path

import pytest

from ckptmove.api import functions as api

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


def test_the_output_is_named_after_the_device(say, ask, bench) -> None:
    document = ask("convert", "run.pth", "--to", "cuda")
    assert document["output"] == "run.cuda0.pth"
    assert document["bytes_copied"] == (bench / "run.cuda0.pth").stat().st_size
    assert document["seconds"] > 0
    assert {edit["to"] for edit in document["plan"]["edits"]} == {"cuda:0"}


def test_the_dry_run_and_the_run_have_one_plan(ask) -> None:
    words = ("convert", "dragged.pth", "--to", "cpu", "-o", "out.pth")
    assert ask(*words, "--dry-run")["plan"] == ask(*words)["plan"]


def test_an_existing_output_is_refused(say, ask, bench) -> None:
    (bench / "out.pth").write_bytes(b"dear")
    words = ("convert", "run.pth", "--to", "cpu", "-o", "out.pth")
    error = ask(*words)["error"]
    assert (error["kind"], error["path"], error["exit_code"]) == ("output-exists", "out.pth", 4)
    assert "--force" in error["hint"]
    assert (bench / "out.pth").read_bytes() == b"dear"
    os.mkfifo(bench / "pipe")
    hint = ask(*words[:-1], "pipe")["error"]["hint"]
    assert "--output" in hint
    assert "--force" not in hint
    assert say(*words, "--force").code == 0
    assert (bench / "out.pth").read_bytes() != b"dear"


def test_the_source_is_never_the_output(ask) -> None:
    error = ask("convert", "run.pth", "--to", "cpu", "-o", "./run.pth", "--force")["error"]
    assert error["kind"] == "output-is-source"


def test_nothing_to_change_is_said_and_copied(say, bench) -> None:
    said = say("convert", "run.pth", "--to", "cuda:3", "--output", "same.pth")
    assert said.code == 0
    assert "nothing to change" in said.out
    assert said.out.splitlines()[-1].startswith("wrote ")
    tensors = [(tensor.name, tensor.device) for tensor in api.inspect("same.pth").inventory.tensors]
    assert tensors == [(tensor.name, tensor.device) for tensor in api.inspect("run.pth").inventory.tensors]


def test_a_damaged_record_stops_it_unless_nobody_looks(ask, bench) -> None:
    words = ("convert", "run.pth", "--to", "cpu", "-o", "out.pth")
    with zipfile.ZipFile("run.pth") as archive:
        (info,) = [one for one in archive.infolist() if one.filename.endswith("/data/0")]
    data = bytearray(Path("run.pth").read_bytes())
    data[info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26))] ^= 4
    Path("run.pth").write_bytes(data)
    before = sorted(bench.iterdir())
    error = ask(*words)["error"]
    assert (error["kind"], error["exit_code"]) == ("crc-mismatch", 3)
    assert sorted(bench.iterdir()) == before
    assert ask(*words, "--no-check")["bytes_copied"] == (bench / "out.pth").stat().st_size
    with zipfile.ZipFile("out.pth") as archive:
        assert archive.testzip() == info.filename


def test_maps_and_flags_and_verbose(say, ask, bench) -> None:
    shutil.copy(SAMPLES / "capturable-adam-cuda0.pt", "graph.pt")
    out = say("convert", "graph.pt", "--map", "cuda:*=cpu", "--dry-run", "-v").out
    assert "set optimizer.param_groups.0.capturable: True -> False (group-flag)\n" in out
    assert "\ngroup-flag        " in out
    document = ask("convert", "graph.pt", "--map", "cuda:*=cpu", "--output", "cpu.pt")
    assert document["plan"]["flags"][0]["to"] == "False"
    assert say("convert", "graph.pt", "--map", "cuda:*=cpu", "-o", "cpu.pt", "--force").only_next == [
        "verify", "cpu.pt",
    ]  # fmt: skip


def test_kept_tensors_are_named_when_asked(say) -> None:
    words = ("convert", "dragged.pth", "--to", "mps", "--keep", "model.*", "--dry-run")
    stays = "cuda:0: 4 tensors (keep)\n"
    assert f"{stays}\nkeep " in say(*words).out
    assert f"{stays}  model.0.weight\n" in say(*words, "-v").out


def test_a_cast_has_to_be_asked_for(ask, say, bench) -> None:
    shutil.copy(SAMPLES / "float64-cpu.pt", "double.pt")
    error = ask("convert", "double.pt", "--to", "mps")["error"]
    assert (error["kind"], error["exit_code"]) == ("unsupported-dtype", 4)
    assert "--cast" in error["hint"]
    casts = [
        edit["cast"] for edit in ask("convert", "double.pt", "--to", "mps", "--cast", "--dry-run")["plan"]["edits"]
    ]
    assert {"from": "float64", "to": "float32"} in casts
    assert "as float32" in say("convert", "double.pt", "--to", "mps", "--cast", "--dry-run").out
    assert ask("inspect", "double.pt", "--expect", "mps")["checkpoints"][0]["expected"]["met"] is False


def test_strings_move_when_asked(ask, bench) -> None:
    shutil.copy(SAMPLES / "namespace-memo-trap.pth", "trap.pth")
    words = ("convert", "trap.pth", "--to", "cuda:0", "--dry-run")
    assert ask(*words)["plan"]["flags"] == []
    (flag,) = ask(*words, "--rewrite-strings")["plan"]["flags"]
    assert (flag["from"], flag["to"]) == ("cpu", "cuda:0")


def test_one_output_for_one_checkpoint(ask, bench) -> None:
    before = sorted(bench.iterdir())
    error = ask("convert", "*.pth", "--to", "cpu", "-o", "out.pth")["error"]
    assert error["kind"] == "usage"
    assert "--output-dir" in error["message"]
    assert ask("convert", "run.pth", "--to", "cpu", "-o", "out.pth", "--output-dir", "out")["error"]["kind"] == "usage"
    assert sorted(bench.iterdir()) == before


def test_a_damaged_source_leaves_nothing(ask, bench) -> None:
    (bench / "cut.pth").write_bytes((bench / "run.pth").read_bytes()[:3000])
    document = ask("convert", "cut.pth", "--to", "cpu")
    assert document["exit_code"] == 3
    assert document["plan"] is None
    assert sorted(path.name for path in bench.iterdir()) == ["cut.pth", "dragged.pth", "run.pth"]


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize("output", ["there", "there/", "link", "new/"])
def test_an_output_that_is_a_folder_is_refused(ask, bench, output, force) -> None:
    (bench / "there").mkdir()
    (bench / "link").symlink_to("there")
    error = ask("convert", "run.pth", "--to", "cpu", "-o", output, *force)["error"]
    assert (error["kind"], error["path"], error["exit_code"]) == ("output-is-folder", output, 4)
    assert error["hint"].endswith(f": --output {output.rstrip('/')}/run.cpu.pth")
    assert not list((bench / "there").iterdir())
    assert not (bench / "new").exists()


def test_standard_output_is_no_place_for_a_checkpoint(ask, bench) -> None:
    error = ask("convert", "run.pth", "--to", "cpu", "-o", "-")["error"]
    assert (error["kind"], error["exit_code"]) == ("output-is-stdout", 2)
    assert not (bench / "-").exists()
    assert ask("convert", "run.pth", "--to", "cpu", "-o", "./-")["output"] == "./-"


def test_a_folder_that_is_not_there(ask) -> None:
    error = ask("convert", "run.pth", "--to", "cpu", "-o", "nowhere/out.pth")["error"]
    assert (error["kind"], error["exit_code"]) == ("write-failed", 5)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("run.pth", "cuda:0"), "did you mean: ckptmove convert run.pth --to=cuda:0"),
        (("cuda:0", "run.pth", "--force"), "did you mean: ckptmove convert --to=cuda:0 run.pth --force"),
        (("run.pth", "other.pth"), "--output"),
        (("run.pth", "cuda:1", "--to", "cuda:0"), "--output"),
    ],
)
def test_a_device_without_its_option_is_given_it(say, words, meant) -> None:
    said = say("convert", *words)
    assert said.code == 2
    assert meant in said.err


def test_the_help_says_when_nothing_is_written(say, ask, bench) -> None:
    told = " ".join(say("convert", "--help").out.split())
    assert "(safetensors, torch.distributed.checkpoint) is copied, and only with --output" in told
    say("convert", "run.pth", "--to", "cpu", "-o", "here.pth")
    assert ask("convert", "here.pth", "--to", "cpu")["plan"]["edits"] == []
    (bench / "w.safetensors").write_bytes((SAMPLES / "weights.safetensors").read_bytes())
    before = sorted(path.name for path in bench.iterdir())
    assert ask("convert", "w.safetensors", "--to", "cpu")["output"] is None
    assert sorted(path.name for path in bench.iterdir()) == before
    say("convert", "w.safetensors", "--to", "cpu", "-o", "copy.safetensors")
    assert (bench / "copy.safetensors").read_bytes() == (bench / "w.safetensors").read_bytes()


def test_what_stays_is_named_where_something_moves_or_was_to_be_kept(say) -> None:
    stays = "stay on cpu: 4 tensors (optimizer-scalar)\n"
    assert stays in say("convert", "run.pth", "--to", "cuda:1", "--dry-run").out
    for more, is_named in (((), False), (("--verbose",), True)):
        said = say("convert", "run.pth", "--to", "cuda:3", "--dry-run", *more).out
        assert "nothing to change" in said
        assert (stays in said, "optimizer-scalar  " in said) == (is_named, is_named)
    kept = say("convert", "run.pth", "--to", "cpu", "--keep", "*", "--dry-run").out
    assert "cuda:3: 12 tensors (keep)\n" in kept
    assert "nothing to change" in kept


@pytest.mark.parametrize(
    ("source", "output", "kind"),
    [
        ("adamw-cuda3.pth", "x.safetensors", "not-in-format"),
        ("adamw-cuda3.pth", "x.SafeTensors", "not-in-format"),
        ("legacy-adamw-cuda1.pth", "x.npz", "output-suffix"),
        ("adamw-cuda3.pth", "x.pt2", "output-suffix"),
        ("hf-trainer-cuda3", "x.safetensors", "not-in-format"),
        ("hf-trainer-cuda3", "x.tar", "output-suffix"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--dry-run",), ("--force",)], ids=" ".join)
def test_a_format_that_cannot_be_written_is_refused(ask, bench, source, output, kind, options) -> None:
    before = {path.name for path in bench.iterdir()}
    document = ask("convert", str(SAMPLES / source), "--to", "cpu", "-o", output, *options)
    assert (document["error"]["kind"], document["exit_code"]) == (kind, 4)
    assert document["error"]["hint"]
    assert {path.name for path in bench.iterdir()} == before


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("adamw-cuda3.pth", "x.ckpt"),
        ("adamw-cuda3.pth", "x.pth.tar"),
        ("adamw-cuda3.pth", "x"),
        ("adamw-cuda3.pth", "x.v2"),
        ("weights.safetensors", "x.safetensors"),
        ("hf-trainer-cuda3", "x"),
        ("hf-trainer-cuda3", "x.v2"),
    ],
)
def test_a_suffix_that_names_no_other_format_is_taken(ask, source, output) -> None:
    assert ask("convert", str(SAMPLES / source), "--to", "cpu", "-o", output)["output"] == output


def test_an_archive_keeps_its_form(ask, bench) -> None:
    shutil.make_archive(str(bench / "runs"), "zip", SAMPLES / "hf-trainer-cuda3")
    assert ask("convert", "runs.zip", "--to", "cpu", "-o", "x.tar")["error"]["kind"] == "output-suffix"
    assert ask("convert", "runs.zip", "--to", "cpu", "-o", "x.zip")["output"] == "x.zip"
    assert ask("convert", "runs.zip", "--to", "cpu", "-o", "x.pth")["format"] == "torch-zip"


def test_the_suffix_of_the_source_is_taken_for_what_it_is(ask, bench) -> None:
    shutil.copy(SAMPLES / "adamw-cuda3.pth", bench / "mine.npz")
    assert ask("convert", "mine.npz", "--to", "cpu", "-o", "other.npz")["output"] == "other.npz"
    assert ask("convert", "mine.npz", "--to", "cpu")["output"] == "mine.cpu.npz"
