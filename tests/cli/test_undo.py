"""What is said of the way back: where there is one, where it leads, and why there is none."""

from __future__ import annotations

import zipfile

import pytest


@pytest.fixture
def original(bench):
    return (bench / "run.pth").read_bytes()


def test_what_was_undone_already_is_as_it_was(ask, bench, original) -> None:
    ask("convert", "run.pth", "--to", "cpu", "--in-place")
    ask("convert", "run.pth", "--undo")
    error = ask("convert", "run.pth", "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("nothing-to-undo", 4)
    assert "or it is as it was before that again" in error["message"]
    assert (bench / "run.pth").read_bytes() == original


def test_what_another_program_has_added_to_was_converted_all_the_same(ask, bench) -> None:
    ask("convert", "run.pth", "--to", "cpu", "--in-place")
    with zipfile.ZipFile("run.pth", "a") as archive:
        archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/note.txt", "mine")
    error = ask("convert", "run.pth", "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("nothing-to-undo", 4)
    assert error["message"].endswith("another program has added to the file since it was converted")
