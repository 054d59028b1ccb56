"""The command `verify --case --fix`: files and backups on the disk, patch, exit codes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from ckptmove.cli.render.human import HumanRenderer
from ckptmove.cli.render.renderer import VerifyAnswer
from ckptmove.cli.render.verification import diff_lines
from ckptmove.cli.streams import Output, page_of
from ckptmove.errors import WriteFailed
from ckptmove.io.sink import FileSink
from ckptmove.proof.checks import passed
from ckptmove.proof.evidence import FixedFile, Verdict
from ckptmove.proof.request import VerifyRequest

pytestmark = pytest.mark.usefixtures("simulates")

NOISE = """
import torch

def noisy(x):
    noise = torch.randn(4, 3)
    return x + noise
"""
SCRIPT = """
import torch
from torch import nn
import ckptmove
from noise import noisy

def case(device):
    model = nn.Linear(3, 2).to(device)
    criterion = nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        inputs, targets = batch
        outputs = model(noisy(inputs))
        return criterion(outputs, targets)

    return ckptmove.Case(model, optimizer, batch=(torch.randn(4, 3, device=device), torch.randn(4, 2)), step=step)

def raising(device):
    raise ValueError
"""
FIXED = {
    "train.py": SCRIPT.replace("    return criterion", "    targets = targets.to(device)\n        return criterion"),
    "noise.py": NOISE.replace("randn(4, 3)", "randn(4, 3).to(x.device)"),
}
WORDS = ("verify", "mine.pth", "--to", "cuda:0", "--case", "train.py:case", "--fix")


@pytest.fixture(autouse=True)
def folder(bench):
    from ckptmove import convert

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, bench / "cpu.pth")
    convert(bench / "cpu.pth", to="cuda:0", output=bench / "mine.pth")
    (bench / "train.py").write_text(SCRIPT)
    (bench / "noise.py").write_text(NOISE)
    return bench


def sources(folder):
    return {name: (folder / name).read_text() for name in FIXED}


@pytest.mark.unmeasured
def test_the_fixes_are_written_to_the_files_of_the_case(say, folder):
    said = say(*WORDS)
    assert (said.code, sources(folder)) == (0, FIXED)
    assert (folder / "train.py.bak").read_text() == SCRIPT
    assert (folder / "noise.py.bak").read_text() == NOISE
    assert "+        targets = targets.to(device)\n" in said.err
    assert said.out.splitlines()[-3:] == [
        "1 edit of noise.py; backup: noise.py.bak",
        "1 edit of train.py; backup: train.py.bak",
        "passed, simulated cuda:0; not looked at: the position in the data",
    ]
    again = say(*WORDS)
    assert (again.code, again.err) == (0, "")
    assert not (folder / "train.py.bak1").exists()


@pytest.mark.unmeasured
def test_the_patch_of_a_dry_run_makes_the_case_pass(say, folder):
    said = say(*WORDS, "--dry-run")
    assert said.code == 1, "that of the files on the disk"
    assert sources(folder) == {"train.py": SCRIPT, "noise.py": NOISE}
    assert not list(folder.glob("*.bak"))
    assert "failed, simulated cuda:0" in said.err
    git = shutil.which("git") or pytest.skip("git is not installed")
    subprocess.run([git, "apply"], input=said.out, text=True, check=True, cwd=folder)
    assert sources(folder) == FIXED
    clean = say(*WORDS, "--dry-run")
    assert (clean.code, clean.out) == (0, "")


LOOP = """
import argparse
import torch
from torch import nn
from noise import noisy

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
path = parser.parse_args().resume
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Linear(3, 2).to(device)
optimizer = torch.optim.AdamW(model.parameters())
stored = torch.load(path, map_location=device)
model.load_state_dict(stored["model"])
optimizer.load_state_dict(stored["optimizer"])
for epoch in range(3):
    inputs, targets = torch.randn(4, 3, device=device), torch.randn(4, 2)
    loss = nn.functional.mse_loss(model(noisy(inputs)), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.unmeasured
def test_the_fixes_of_a_script_are_written(say, folder):
    (folder / "loop.py").write_text(LOOP)
    said = say("verify", "mine.pth", "--to", "cuda:0", "--script", "loop.py", "--fix", "--", "--resume", "mine.pth")
    assert said.code == 0, said.out
    assert (folder / "noise.py").read_text() == FIXED["noise.py"]
    assert (folder / "loop.py").read_text() != LOOP
    assert (folder / "loop.py.bak").read_text() == LOOP


def test_the_other_formats_name_the_files(ask, say, folder):
    document = ask(*WORDS, "--dry-run")
    (result,) = document["results"]
    assert [(one["path"], one["fixes"], one["backup"]) for one in result["fixed"]] == [
        ("noise.py", 1, None),
        ("train.py", 1, None),
    ]
    assert (document["exit_code"], result["passed"], result["unfixed"]) == (1, False, None)
    annotations = say(*WORDS, "--format", "github").out.splitlines()
    assert sources(folder) == FIXED
    assert sum(line.startswith("::notice file=noise.py,title=verify --fix::") for line in annotations) == 1
    (result,) = ask(*WORDS)["results"]
    assert (result["passed"], result["fixed"], result["unfixed"]) == (True, [], None)


def test_one_line_with_quiet(say, folder):
    said = say(*WORDS, "--dry-run", "-q")
    assert said.out.startswith("--- a/noise.py\n+++ b/noise.py\n")
    assert said.err.splitlines()[0] == "mine.pth: failed, simulated cuda:0 (case)"
    said = say(*WORDS, "-q")
    assert said.out == "mine.pth: passed, simulated cuda:0; not looked at: the position in the data\n"
    assert said.err.splitlines() == [
        "1 edit of noise.py; backup: noise.py.bak",
        "1 edit of train.py; backup: train.py.bak",
    ]


def test_a_fault_without_a_fix_is_reported(ask, folder):
    document = ask(*[word.replace(":case", ":raising") for word in WORDS])
    (result,) = document["results"]
    assert document["exit_code"] == 1
    assert (result["unfixed"], result["fixed"]) == ("no fix is known", [])
    assert sources(folder) == {"train.py": SCRIPT, "noise.py": NOISE}


@pytest.mark.unmeasured
def test_the_option_is_suggested(say):
    hint = "hint: --fix edits your files, and --fix --dry-run prints the patch\n"
    assert say(*WORDS[:-1]).err == hint
    assert hint not in say(*WORDS).err
    assert hint not in say(*[word.replace(":case", ":raising") for word in WORDS[:-1]]).err


def test_what_is_not_fixed_is_in_the_report(say):
    said = say(*[word.replace(":case", ":raising") for word in WORDS])
    assert "not fixed: no fix is known\n" in said.out


@pytest.mark.unmeasured
def test_line_endings_stay(say, folder):
    (folder / "train.py").write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    assert say(*WORDS).code == 0
    assert (folder / "train.py").read_bytes() == FIXED["train.py"].replace("\n", "\r\n").encode()


def test_a_file_that_is_read_only_is_named(ask, folder):
    (folder / "noise.py").chmod(0o444)
    (result,) = ask(*WORDS)["results"]
    assert (result["unfixed"], result["fixed"]) == ("noise.py is read-only", [])


@pytest.mark.unmeasured
def test_an_error_of_the_system_leaves_the_files(ask, folder, monkeypatch):
    def failing(sink, **_options):
        raise WriteFailed(sink.path, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileSink, "commit", failing)
    error = ask(*WORDS)["error"]
    assert (error["kind"], error["exit_code"]) == ("fix-not-written", 5)
    assert error["hint"]
    assert sources(folder) == {"train.py": SCRIPT, "noise.py": NOISE}


@pytest.mark.parametrize(
    "words",
    [
        ["mine.pth", "--fix"],
        ["mine.pth", "--case", "train.py:case", "--dry-run"],
        ["mine.pth", "cpu.pth", "--case", "train.py:case", "--fix"],
    ],
)
def test_options_that_do_not_fit_are_refused(ask, words):
    error = ask("verify", *words)["error"]
    assert (error["kind"], error["exit_code"]) == ("usage", 2)


def test_a_terminal_shows_the_patch_in_color(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    diff = "--- a/t.py\n+++ b/t.py\n@@ -1 +1,2 @@\n \ta\r\n+\x1b[2J\n"
    fixed = (FixedFile("t.py", 1, diff, None),)
    result = Verdict(
        path="run.pth",
        target="cpu",
        mode="cpu",
        passed=True,
        proven=True,
        checks=(passed("case", ""),),
        findings=(),
        fixed=fixed,
    )
    HumanRenderer(Output()).verify(VerifyAnswer(VerifyRequest(path="run.pth"), result, dry_run=True))
    out = capsys.readouterr().out
    page = page_of(sys.stdout)
    assert page.color
    assert out.splitlines() == [*diff_lines(page, fixed)]
    assert page.paint("+\\x1b[2J", "green") in out
    assert "\r" not in out
