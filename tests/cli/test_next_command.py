"""What the program says to type next, and what it does where nobody listens."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ckptmove.checkpoint import open_checkpoint

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"


def test_no_command_helps_a_file_whose_bytes_are_lost(tmp_path, say):
    path = Path(shutil.copy(SAMPLES / "adam-mps.pt", tmp_path / "flipped.pt"))
    with open_checkpoint(str(path)) as checkpoint:
        span = checkpoint.container.storage_span("0")
    data = bytearray(path.read_bytes())
    data[span.start] ^= 1
    path.write_bytes(data)
    assert "next: ckptmove verify" in say("inspect", str(path)).err
    assert "next:" not in say("inspect", "--check", str(path)).err


def test_what_is_not_where_it_was_expected_is_converted(say):
    path = str(SAMPLES / "tutorial-sgd-cpu.pth")
    said = say("inspect", path, "--expect", "cuda:0")
    assert said.code == 1
    assert f"next: ckptmove convert {path} --to cuda:0" in said.err


def test_a_name_that_no_tensor_has(say):
    assert "no tensor of that name" in say("inspect", str(SAMPLES / "adam-mps.pt"), "--match", "zzz*").out


def test_a_closed_output_is_no_bug():
    program = f"exec {sys.executable} -m ckptmove inspect {SAMPLES / 'adam-mps.pt'} >&-"
    done = subprocess.run(["sh", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
