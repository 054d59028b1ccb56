"""Hints for errors, notes and findings depend on their fields, not on their text."""

from __future__ import annotations

import pytest

from ckptmove.api.hints import hint_for
from ckptmove.api.inspection import Inspection, InspectRequest
from ckptmove.cli.next_command import after_inspection
from ckptmove.cli.render.conversion import conversion_lines
from ckptmove.cli.render.renderer import InspectAnswer
from ckptmove.cli.render.text import Page
from ckptmove.conversion.results import Converted
from ckptmove.errors import EmptyDirectory, NothingToUndo
from ckptmove.model import Finding, Inventory, Severity
from ckptmove.moves import MovePlan, MoveRequest
from ckptmove.text import Command


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (NothingToUndo("a", "never", "safetensors"), "it stores no device"),
        (NothingToUndo("a", "never", "directory"), "the original is unchanged"),
        (NothingToUndo("a", "never", "archive"), "the original is unchanged"),
        (NothingToUndo("a", "it is a directory of sorts", "pickle"), "convert it back"),
        (EmptyDirectory("a", 1, "some files", "tar", is_cut=True), "it was cut off in transit"),
        (EmptyDirectory("a", 1, "a tar without its end", "tar"), "ckptmove reads directories"),
        (EmptyDirectory("a", 1, "some files", "tar", inner="b"), "unpack it, and use that file: python -m tarfile"),
        (EmptyDirectory("a", 1, "a tar of a zip", "zip", inner="b"), "unpack it, and use that file: python -m zipfile"),
    ],
)
def test_hints(error, hint) -> None:
    assert hint_for(error).startswith(hint)


@pytest.mark.parametrize("path", ["run.pth", "weights.safetensors"])
def test_what_cannot_be_undone_knows_what_the_file_is(bench, path) -> None:
    import torch
    from safetensors.torch import save_file

    import ckptmove

    save_file({"w": torch.ones(1)}, bench / "weights.safetensors")
    with pytest.raises(NothingToUndo) as caught:
        ckptmove.undo(path)
    assert caught.value.container == ("torch-zip" if path == "run.pth" else "safetensors")


WORDS = "no command, though it speaks of ckptmove runs, " * 3


@pytest.mark.parametrize(("note", "is_wrapped"), [(WORDS, True), (Command(WORDS), False)])
def test_a_note_stays_in_one_line_where_it_has_a_command(note, is_wrapped) -> None:
    plan = MovePlan(MoveRequest("cpu"))
    result = Converted(container="torch-zip", plan=plan, output="b", bytes_copied=1, seconds=0.0, notes=(note,))
    lines = list(conversion_lines(Page(columns=60), "a", result, verbose=False))
    assert (lines[-1].startswith("  ")) == is_wrapped


@pytest.mark.parametrize("fix", ["ckptmove writes no such thing", Command("ckptmove convert a --to cpu")])
def test_the_next_command_is_a_fix_that_is_one(fix) -> None:
    finding = Finding("D102", "optimizer-device", Severity.WARNING, "", (), fix)
    inventory = Inventory(path="a", container="torch-zip", layout="plain", size_bytes=1)
    expected = fix if isinstance(fix, Command) else "ckptmove verify a"
    answer = InspectAnswer(InspectRequest("a"), Inspection(inventory, (finding,)), (), None, 0)
    assert after_inspection(answer) == expected
