"""The report of an undo: whether one is possible, what it restores, and why there is none."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"


@pytest.fixture
def original(bench):
    return (bench / "run.pth").read_bytes()


def test_what_was_undone_already_is_as_it_was(ask, bench, original) -> None:
    ask("convert", "run.pth", "--to", "cpu", "--in-place")
    ask("convert", "run.pth", "--undo")
    error = ask("convert", "run.pth", "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("nothing-to-undo", 4)
    assert (bench / "run.pth").read_bytes() == original


def test_an_undo_is_annotated(say, bench) -> None:
    say("convert", "run.pth", "--to", "cpu", "--in-place")
    assert say("convert", "run.pth", "--undo", "--format", "github").out.startswith("::notice file=run.pth,")


def test_what_another_program_has_added_to_was_converted_all_the_same(ask, bench) -> None:
    ask("convert", "run.pth", "--to", "cpu", "--in-place")
    with zipfile.ZipFile("run.pth", "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/note.txt", "mine")
    error = ask("convert", "run.pth", "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("nothing-to-undo", 4)
    assert "another program" in error["message"]


def test_the_second_conversion_says_how_far_back_an_undo_goes(ask, bench, original) -> None:
    ask("convert", "run.pth", "--to", "cpu", "--in-place")
    document = ask("convert", "run.pth", "--to", "mps", "--in-place")
    [note] = document["notes"]
    assert " all " in note
    assert note.endswith(" convert run.pth --undo")
    ask("convert", "run.pth", "--undo")
    assert (bench / "run.pth").read_bytes() == original


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_other_names_of_the_file_are_told(ask, bench, more) -> None:
    (bench / "latest.pth").symlink_to("run.pth")
    (bench / "best.pth").hardlink_to("run.pth")
    linked, hard, *rest = ask("convert", "latest.pth", "--to", "cpu", "--in-place", *more)["notes"]
    assert linked.startswith("it is a symbolic link: ")
    assert str((bench / "run.pth").resolve()) in linked
    assert " 1 other hard link " in hard
    assert len(rest) == (0 if more else 1)
    assert (bench / "latest.pth").is_symlink()
    assert (bench / "best.pth").samefile("run.pth")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hf-trainer-cuda3", "to see the devices of this one: ckptmove inspect {}"),
        ("weights.safetensors", "it stores no device, so no conversion has changed it"),
        ("legacy-adamw-cuda1.pth", "convert it back with --to"),
    ],
)
def test_where_nothing_can_be_undone_there_is_another_way_back(say, name, hint) -> None:
    path = str(SAMPLES / name)
    assert f"{hint.format(path)}\n" in say("convert", path, "--undo").err


def test_an_archive_of_files_is_what_it_was(say, bench) -> None:
    with zipfile.ZipFile(bench / "a.zip", "w") as archive:
        archive.write(bench / "run.pth", "run.pth")
    assert say("convert", "a.zip", "--undo").err.endswith(": ckptmove inspect a.zip\n")
