"""The table of `benchmarks/corpus.py` over the samples: torch agrees with each of them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import ckptmove

pytest.importorskip("torch")

from agreement import NotComparableError, differences, round_trip

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_ckpts"


@pytest.mark.slow
def test_a_folder_as_a_table(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "corpus.py"), str(SAMPLES)],
        env={"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split()[:5] == ["kind", "files", "read", "refused", "converted"]
    assert {row.split()[0]: row.split()[1:4] for row in rows if row.startswith(("hf-trainer", "sharded"))} == {
        "hf-trainer-cuda3": ["5", "4", "1"],
        "sharded-two-gpus": ["3", "2", "1"],
    }
    assert rows[-1].startswith("all ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["adamw-cuda3.pth", "script-code-cuda0.pt", "weights.safetensors"])
def test_what_disagrees_is_said(file):
    inventory = ckptmove.inspect(str(SAMPLES / file)).inventory
    assert differences(SAMPLES / file, inventory) == []
    first, *rest = inventory.tensors
    for other in ([first._replace(dtype="int64"), *rest], rest):
        assert differences(SAMPLES / file, replace(inventory, tensors=tuple(other)))


def test_a_device_that_disagrees_is_said():
    path = SAMPLES / "adam-mps.pt"
    inventory = ckptmove.inspect(str(path)).inventory
    wrong = replace(inventory, tensors=tuple(one._replace(device="cuda:0") for one in inventory.tensors))
    assert differences(path, wrong)[0] == "model.0.weight: is on mps"


@pytest.mark.parametrize("file", ["bare-pickle-cuda2.pkl", "namespace-memo-trap.pth"])
def test_what_torch_does_not_say_is_not_comparable(file):
    with pytest.raises(NotComparableError):
        differences(SAMPLES / file, ckptmove.inspect(str(SAMPLES / file)).inventory)


def test_a_way_there_and_back(tmp_path):
    assert round_trip(SAMPLES / "adamw-cuda3.pth", tmp_path) == "same bytes"
    assert round_trip(SAMPLES / "zipped-again.pth", tmp_path) == "same tensors"
    assert round_trip(SAMPLES / "map-location-dragged-all.pth", tmp_path) == "same tensors", (
        "except the corrected device"
    )
