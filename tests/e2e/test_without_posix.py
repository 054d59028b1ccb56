"""Every command in a Python with the names of Windows only: same output and same files, byte for byte."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_ckpts"
CASE = """
import torch
from ckptmove import Case

def make():
    model = torch.nn.Linear(2, 1)
    return Case(model, torch.optim.AdamW(model.parameters()), torch.nn.MSELoss(), (torch.ones(4, 2), torch.ones(4, 1)))
"""
SESSIONS = {
    "help": ["--help", "inspect --help", "convert --help", "rules", "rules F801", "--version"],
    "inspect": [
        "inspect run.pth", "inspect run.pth --check --json", "inspect run --check", "inspect run.zip", "inspect *.pth",
        "inspect модель.pth", "inspect gone.pth", "inspect run.pth --tree --tensors", "inspect run.pth --format github",
    ],
    "convert": [
        "convert run.pth --to cpu --dry-run", "convert run.pth --to cpu", "convert run.pth --to cpu",
        "convert run.pth --to cpu --force", "convert run.pth --to mps --no-check -o new.pth",
        "convert модель.pth --to cpu --json", "convert run.pth --to cpu -o gone/out.pth",
        "convert run.pth --to cpu -o run/",
    ],
    "directory": [
        "convert run --to cpu --dry-run", "convert run --to cpu", "convert run --to cpu",
        "convert run --to cpu --force",
        "convert run --to mps --no-check -o new", "convert run --to cpu -o run/inside", "diff run run.cpu",
    ],
    "archive": ["convert run.zip --to cpu", "convert run.zip --to cpu --force --no-check", "diff run.zip run.cpu.zip"],
    "in place": [
        "convert run.pth --to cpu --in-place --dry-run", "convert run.pth --to cpu --in-place", "inspect run.pth",
        "convert run.pth --undo --dry-run", "convert run.pth --undo", "convert run.pth --undo", "inspect run.pth",
    ],
    "diff": ["diff run.pth модель.pth", "diff run.pth legacy.pth --json", "diff run.pth gone.pth"],
    "verify": [
        "verify run.pth --to cpu --junit report.xml", "verify run.pth модель.pth --against run.pth --json",
        "verify run --to cuda:0", "verify gone.pth",
    ],
    "case": ["verify small.pth --case case.py:make", "verify small.pth --case case.py:gone"],
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files at the start of each session."""
    import torch

    folder = tmp_path_factory.mktemp("files")
    shutil.copy(SAMPLES / "adamw-cuda3.pth", folder / "run.pth")
    shutil.copy(SAMPLES / "map-location-dragged-all.pth", folder / "модель.pth")
    shutil.copy(SAMPLES / "legacy-adamw-cuda1.pth", folder / "legacy.pth")
    shutil.copytree(SAMPLES / "hf-trainer-cuda3", folder / "run")
    shutil.make_archive(str(folder / "run"), "zip", folder / "run")
    (folder / "case.py").write_text(CASE)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "small.pth")
    return folder


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """A folder for PYTHONPATH that removes the features that Windows lacks, also in child processes."""
    folder = tmp_path_factory.mktemp("windows")
    (folder / "sitecustomize.py").write_text("import without_posix\n")
    return os.pathsep.join([str(folder), str(ROOT / "tests" / "support")])


#: Runs the commands of a session; prints the exit code, the output and the files after each, as JSON.
PROGRAM = """
import hashlib, io, json, os, sys, warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from ckptmove.cli.app import main

def hashed():
    # Bytecode has the path of its source, and a report has times.
    paths = [path for path in Path().rglob("*") if path.is_file() and path.suffix not in {".pyc", ".xml"}]
    return {path.as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

def run(line):
    out, err = (io.TextIOWrapper(io.BytesIO(), "cp1252", errors) for errors in ("strict", "backslashreplace"))
    sys.argv = ["ckptmove", *line.split()]
    code = None
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        try:
            main()
        except SystemExit as error:
            code = error.code
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("cp1252"))
    report = Path("report.xml")
    return [code, *texts, report.read_text() if report.exists() else "", hashed()]

told = {}
for session, lines in json.loads(sys.argv[1]).items():
    os.chdir(session)
    told[session] = [run(line) for line in lines]
    os.chdir("..")
print(json.dumps(told))
"""


def run(folder, files, path=""):
    """Results of each command of each session: exit code, output without times, and every file."""
    for session in SESSIONS:
        shutil.copytree(files, folder / session)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)])), "COLUMNS": "100"}
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(SESSIONS)], cwd=folder, env=environment, stdout=subprocess.PIPE,
        text=True, check=True,
    )  # fmt: skip
    return {
        (session, line): (
            code,
            [re.sub(r'\d+\.\d+ s\b(, [\d.]+ \w+/s)?|(?<="seconds": )[\d.e-]+', "T", it) for it in texts],
            files,
        )
        for session, results in json.loads(told.stdout).items()
        for line, (code, *texts, files) in zip(SESSIONS[session], results, strict=True)
    }


@pytest.mark.slow
def test_it_answers_and_writes_the_same(files, windows, tmp_path):
    here, there = run(tmp_path / "here", files), run(tmp_path / "there", files, windows)
    assert 70 not in {code for code, *_ in here.values()}
    assert there == here


def test_what_is_open_or_a_folder_is_refused_there(windows, tmp_path):
    program = """
import os
from pathlib import Path
from ckptmove.cli import signals
def refused(call):
    try: call()
    except PermissionError: return True
assert not hasattr(os, "pread") and not hasattr(os, "O_DIRECTORY") and len(signals._SIGNALS) == 2
assert refused(lambda: os.open(".", os.O_RDONLY))
with open("a", "w") as file:
    assert refused(lambda: Path("a").unlink()) and refused(lambda: os.replace("a", "b"))
os.replace("a", "b")
try: import fcntl
except ImportError: print("as there")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([windows, str(ROOT)])}
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (told.stdout, told.stderr) == ("as there\n", "")
