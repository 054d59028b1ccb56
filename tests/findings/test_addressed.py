"""The fixes for a directory with several checkpoints name the one that has the problem."""

from __future__ import annotations

import shutil
from pathlib import Path

import ckptmove

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
DRAGGED, WRAPPED, LEGACY = "map-location-dragged-all.pth", "dataparallel-two-gpus.pth", "legacy-adamw-cuda1.pth"


def fixes_of(folder, *names, **options):
    folder.mkdir()
    for name in names:
        shutil.copy(SAMPLES / name, folder / name)
    return {one.code: one.fix for one in ckptmove.inspect(folder, **options).findings}


def test_the_command_converts_the_checkpoint_that_it_helps(tmp_path):
    folder = tmp_path / "runs"
    fixes = fixes_of(folder, DRAGGED, WRAPPED, LEGACY)
    assert fixes["R301"] == f"ckptmove convert {folder}/{DRAGGED} --to cuda:0"
    assert fixes["K601"] == f"ckptmove convert {folder}/{WRAPPED} --strip-prefix"


def test_a_finding_in_several_checkpoints_needs_a_look_at_each(tmp_path):
    folder = tmp_path / "runs"
    assert fixes_of(folder, DRAGGED, WRAPPED, LEGACY)["D103"] == f"ckptmove inspect '{folder}/**'"


def test_a_single_checkpoint_is_the_directory(tmp_path):
    folder = tmp_path / "run"
    assert fixes_of(folder, DRAGGED)["R301"] == f"ckptmove convert {folder} --to cuda:0"


def test_folders_of_checkpoints(tmp_path):
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(SAMPLES / "hf-trainer-cuda3", tmp_path / "out" / name)
    spoiled = tmp_path / "out" / "checkpoint-2" / "spare.pth"
    shutil.copy(SAMPLES / DRAGGED, spoiled)
    found = ckptmove.inspect(tmp_path / "out").findings
    fix = next(one.fix for one in found if one.code == "R301")
    assert fix == f"ckptmove convert {tmp_path}/out/checkpoint-2 --to cuda:3"
