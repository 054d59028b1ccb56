"""The output of `benchmarks/verdicts.py` for a folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_ckpts"


@pytest.mark.slow
def test_a_folder_with_one_that_resumes_and_one_that_does_not(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in ("adamw-cuda3.pth", "weights.safetensors"):
        shutil.copy(SAMPLES / name, folder)
    (folder / "notes.txt").write_text("no checkpoint")
    broken = torch.load(SAMPLES / "adamw-cuda3.pth", map_location="cpu")
    broken["optimizer"]["state"][0]["exp_avg_sq"].view(-1)[0] = float("nan")
    torch.save(broken, folder / "broken.pth")
    program = [sys.executable, str(ROOT / "benchmarks" / "verdicts.py"), str(folder), "--to", "cpu"]
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "adamw-cuda3.pth: AdamW: passed, cpu; scheduler: in the file, not looked at",
        "broken.pth: AdamW: failed, cpu (N501)",
        "2 more: not a checkpoint of torch.save, or without an optimizer",
    ]
