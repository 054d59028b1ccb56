"""Every command that is printed for a sample or for a fault of the catalogue runs when it is pasted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import printed
from faults import FAULTS  # it imports torch

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).parents[2]
SAMPLES = sorted(
    path
    for path in (ROOT / "sample_ckpts").iterdir()
    if path.suffix not in {".py", ".json", ".md"} and path.name[0] not in "._"
)
#: The printed commands follow from the finding or the check: one fault of each.
ONE_EACH = [*{fault.caught_by: fault for fault in FAULTS}.values()]
#: A choice of what the benchmark types: each sample has one of them in turn, after `inspect`.
ASKED = (
    "inspect --expect mps",
    "convert --to mps --in-place",
    "convert --plain",
    "convert -o out.safetensors",
    "convert --only model -o out.safetensors",
)


@pytest.mark.parametrize(("turn", "path"), [*enumerate(SAMPLES)], ids=[path.name for path in SAMPLES])
def test_the_commands_for_a_sample_run(turn, path):
    assert printed.failing(path, ["inspect", ASKED[turn % len(ASKED)]]) == []


@pytest.mark.parametrize("fault", ONE_EACH, ids=[fault.name for fault in ONE_EACH])
def test_the_commands_for_a_fault_run(fault, tmp_path):
    path, options = fault.make(tmp_path)
    to = f" --to {options['to']}" if options.get("to") else ""
    assert printed.failing(Path(path), ["inspect", f"verify{to}"]) == []


def test_a_command_ends_with_its_sentence():
    text = "fix: mend it: ckptmove inspect 'a b'; or ckptmove verify x --to cpu\nnext: ckptmove diff a b\n"
    assert [*printed.printed(text)] == [["inspect", "a b"], ["diff", "a", "b"]]


def test_a_command_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(printed, "_run", lambda words, folder: (len(words), "next: ckptmove verify x"))
    [line] = printed.failing(SAMPLES[0], ["inspect"])
    assert "prints `verify x`, which exits with 2" in line
