from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path

import pytest
import torch

WEIGHTS = Path(__file__).parents[2] / "sample_ckpts" / "weights.safetensors"


def test_expect_names_what_is_elsewhere(say, ask) -> None:
    said = say("inspect", "dragged.pth", "--expect", "cuda:0", "--select", "N")
    assert said.code == 1
    assert "expected on cuda:0: no, 6 tensors" in said.out
    assert re.search(r"  at  optimizer.state.0.step .*cuda:0\n", said.out)
    assert say("inspect", "dragged.pth", "--expect", "cuda:0", "-q", "--select", "N").out.endswith("; not on cuda:0\n")
    line = say("inspect", "dragged.pth", "--expect", "cuda:0", "--format", "github", "--select", "N").out
    assert re.match("::error file=dragged.pth,title=expect::.*cuda:0: optimizer.state.0.step, ", line)
    (checkpoint,) = ask("inspect", "dragged.pth", "--expect", "cuda:0")["checkpoints"]
    steps = [edit["names"] for edit in checkpoint["expected"]["misplaced"]]
    assert ["optimizer.state.0.step"] in steps


def test_expect_is_met(say) -> None:
    said = say("inspect", "run.pth", "--expect", "cuda:3", "--select", "N")
    assert said.code == 0
    assert "cuda:3: yes\n" in said.out
    assert say("inspect", "run.pth", "--expect", "cuda:3", "--format", "github", "--select", "N").out == ""


def test_expect_says_where_no_device_is_stored(say, ask, bench) -> None:
    shutil.copy(WEIGHTS, bench)
    said = say("inspect", "weights.safetensors", "--expect", "cuda:0")
    assert said.code == 0
    assert "\nunknown: " in said.out
    assert "cuda:0: yes (4 tensors" in said.out
    (checkpoint,) = ask("inspect", "weights.safetensors", "--expect", "cuda:0")["checkpoints"]
    assert checkpoint["expected"] == {"device": "cuda:0", "met": True, "unplaced": 4, "misplaced": []}


def test_strict_fails_on_warnings(say, bench) -> None:
    words = ("inspect", "dragged.pth", "--select", "O201")
    assert say(*words).code == 0
    assert say(*words, "--strict").code == 1


def test_devices_is_the_size_of_the_target(say) -> None:
    assert say("inspect", "run.pth", "--select", "D103", "--devices", "3").code == 1
    assert say("inspect", "run.pth", "--select", "D103", "--devices", "4").code == 0


def test_tree_and_globals(say) -> None:
    out = say("inspect", "run.pth", "--tree", "--globals", "--tensors").out
    assert "\n    0.weight: float32 [" in out
    assert "\ntorch._utils._rebuild_tensor_v2  since 2.4     safe\n" in out
    assert "\nmodel.0.weight " in out
    assert "\nsafe       " in out
    assert "add_safe_globals" not in out
    assert "\nimports nothing\n" in say("inspect", str(WEIGHTS), "--globals").out


def test_globals_come_with_the_command_that_replaces_them(say, tmp_path) -> None:
    torch.save({"args": argparse.Namespace(lr=1)}, tmp_path / "args.pt")

    said = say("inspect", "args.pt", "--globals").out
    assert "argparse.Namespace" in said
    assert "ckptmove convert args.pt --plain" in said


def test_match_filters_the_document_too(ask) -> None:
    (checkpoint,) = ask("inspect", "run.pth", "--match", "model.*")["checkpoints"]
    assert {tensor["role"] for tensor in checkpoint["tensors"]} == {"model"}
    assert {share["role"] for share in checkpoint["devices"]} == {"model", "optimizer"}


def test_verbose_names_every_place(say) -> None:
    brief = say("inspect", "run.pth", "--select", "D103").out
    full = say("inspect", "run.pth", "--select", "D103", "--verbose").out
    assert brief.count("\n  at  ") == 3
    assert full.count("\n  at  ") == 12
    assert "more (-v" not in full


def test_check_says_where_there_are_no_crcs(say, ask, bench) -> None:
    torch.save(torch.load("dragged.pth", map_location="cpu"), "old.pt", _use_new_zipfile_serialization=False)
    line = "not checked: the file has no CRCs"
    assert line in say("inspect", "old.pt", "--check").out.splitlines()
    assert say("inspect", "old.pt", "--check", "-q").out.endswith("; no CRCs\n")
    assert (
        f"::notice file=old.pt,title=inspect --check::{line}"
        in say("inspect", "old.pt", "--check", "--format", "github").out.splitlines()
    )
    for words, expected in ((("old.pt", "--check"), ["old.pt"]), (("old.pt",), []), (("run.pth", "--check"), [])):
        assert ask("inspect", *words)["checkpoints"][0]["unchecked"] == expected
        assert ("CRCs" in say("inspect", *words).out) == bool(expected)


def test_check_names_the_files_without_crcs(say, ask, bench) -> None:
    (bench / "all").mkdir()
    for name in "abcd":
        torch.save({"w": torch.ones(1)}, bench / f"all/{name}.pt", _use_new_zipfile_serialization=False)
    shutil.copy("run.pth", "all")
    (bench / "all/notes.txt").write_text("no checkpoint")
    (checkpoint,) = ask("inspect", "all", "--check")["checkpoints"]
    assert checkpoint["unchecked"] == ["a.pt", "b.pt", "c.pt", "d.pt"]
    line = "not checked: no CRCs in a.pt, b.pt, c.pt and 1 more"
    assert line in say("inspect", "all", "--check").out.splitlines()
    for form, expected in (("zip", []), ("tar", ["a.pt", "b.pt", "c.pt", "d.pt"])):
        path = shutil.make_archive("packed", form, "all")
        assert ask("inspect", path, "--check")["checkpoints"][0]["unchecked"] == expected


def test_check_reads_every_record(ask, bench) -> None:
    data = bytearray((bench / "run.pth").read_bytes())
    (bench / "flipped.pth").write_bytes(_flip_a_weight(data))
    assert _codes(ask("inspect", "flipped.pth")) == _codes(ask("inspect", "run.pth"))
    assert _codes(ask("inspect", "flipped.pth", "--check")) - _codes(ask("inspect", "run.pth")) == {"F801"}


def _flip_a_weight(data: bytearray) -> bytes:
    place = data.index(b"FB", data.index(b"data/0")) + 64
    while data[place] in b"Z\0":
        place += 1
    data[place] ^= 1
    return bytes(data)


def _codes(document) -> set[str]:
    return {finding["code"] for finding in document["checkpoints"][0]["findings"]}


def test_several_paths_are_all_reported(say, ask, bench) -> None:
    words = ("inspect", "run.pth", "none.pth", "dragged.pth", "--select", "N")
    document = ask(*words)
    assert document["exit_code"] == 3
    assert [checkpoint["path"] for checkpoint in document["checkpoints"]] == ["run.pth", "dragged.pth"]
    assert [(error["kind"], error["path"]) for error in document["errors"]] == [("missing-file", "none.pth")]
    said = say(*words)
    assert said.code == 3
    assert said.out.startswith("run.pth\n")
    assert "\nno findings\n\ndragged.pth\n" in said.out
    assert said.out.endswith("\n\n2 of 3 fine\n")
    assert re.search(r"^error: none.pth: .*\nhint: ", said.err, re.MULTILINE)


@pytest.mark.parametrize("form", ["human", "github"])
def test_globs_are_expanded_each_file_once(say, bench, form) -> None:
    (bench / "deep" / "er").mkdir(parents=True)
    shutil.copy("run.pth", "deep/er/last.pth")
    said = say("inspect", "**/*.pth", "run.pth", "-q", "--select", "N")
    *lines, summary = said.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["deep/er/last.pth", "dragged.pth", "run.pth"]
    assert summary == "3 of 3 fine"
    missing = say("inspect", "epoch*.pth", "--format", form)
    assert missing.code == 3
    assert "epoch*.pth" in missing.out + missing.err
    assert "glob" in missing.out + missing.err


def test_a_name_with_brackets_is_a_name_where_it_is_there(say, bench) -> None:
    shutil.copy("run.pth", "run[1].pth")
    assert say("inspect", "run[1].pth", "-q", "--select", "N").out.startswith("run[1].pth: no ")


def test_the_next_command_is_what_mends_or_verifies(say) -> None:
    assert say("inspect", "run.pth").only_next == ["verify", "run.pth"]
    assert say("inspect", "run.pth", "--devices", "1").only_next == ["convert", "run.pth", "--to", "cuda:0"]
    assert say("inspect", "run.pth", "-q").err == ""
