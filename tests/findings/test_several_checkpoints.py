"""The fixes for a directory with several checkpoints name the one that has the problem."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckptmove

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
DRAGGED, WRAPPED, LEGACY = "map-location-dragged-all.pth", "dataparallel-two-gpus.pth", "legacy-adamw-cuda1.pth"
COMPILED = "nanogpt-compiled-fused.pt"


def fixes_of(folder, *names, **options):
    folder.mkdir()
    for name in names:
        shutil.copy(SAMPLES / name, folder / name)
    return {one.code: one.fix for one in ckptmove.inspect(folder, **options).findings}


def test_the_command_converts_the_checkpoint_that_it_helps(tmp_path):
    folder = tmp_path / "runs"
    fixes = fixes_of(folder, DRAGGED, COMPILED, LEGACY)
    assert fixes["R301"] == f"ckptmove convert {folder}/{DRAGGED} --to cuda:0"
    assert fixes["K601"] == f"ckptmove convert {folder}/{COMPILED} --strip-prefix"


def test_a_finding_in_several_checkpoints_needs_a_look_at_each(tmp_path):
    folder = tmp_path / "runs"
    assert fixes_of(folder, DRAGGED, WRAPPED, LEGACY)["D103"] == f"ckptmove inspect '{folder}/**'"


def test_a_single_checkpoint_is_the_directory(tmp_path):
    folder = tmp_path / "run"
    assert fixes_of(folder, DRAGGED)["R301"] == f"ckptmove convert {folder} --to cuda:0"


@pytest.mark.parametrize(("healthy", "dragged"), [("run", "run.old"), ("run1", "run10"), ("run.old", "run")])
def test_folders_whose_names_begin_alike(tmp_path, healthy, dragged):
    for name in (healthy, dragged):
        shutil.copytree(SAMPLES / "hf-trainer-cuda3", tmp_path / "out" / name)
    shutil.copy(SAMPLES / DRAGGED, tmp_path / "out" / dragged / "spare.pth")
    found = ckptmove.inspect(tmp_path / "out").findings
    fix = next(one.fix for one in found if one.code == "R301")
    assert fix == f"ckptmove convert {tmp_path}/out/{dragged} --to cuda:3"


@pytest.mark.parametrize("names", [("a.pth", "a.pth.bak"), ("e.1", "e.1.5"), ("e.1.5", "e.1")])
def test_files_whose_names_begin_alike(tmp_path, names):
    for name, sample in zip(names, (LEGACY, DRAGGED), strict=True):
        shutil.copy(SAMPLES / sample, tmp_path / name)
    found = {one.code: one.fix for one in ckptmove.inspect(tmp_path).findings}
    assert found["R301"] == f"ckptmove convert {tmp_path}/{names[1]} --to cuda:0"


def test_the_target_is_that_of_the_checkpoint(tmp_path):
    shutil.copy(SAMPLES / DRAGGED, tmp_path / "a.pth")
    ckptmove.convert(
        SAMPLES / WRAPPED, map_location={"cuda:0": "cuda:3", "cuda:1": "cuda:2"}, output=tmp_path / "b.pth"
    )
    fix = {one.code: one.fix for one in ckptmove.inspect(tmp_path).findings}["D101"]
    assert fix == {one.code: one.fix for one in ckptmove.inspect(tmp_path / "b.pth").findings}["D101"]
    assert "cuda:0" not in fix


def test_a_command_in_a_comment_names_the_checkpoint_too(tmp_path):
    fixes = fixes_of(tmp_path / "runs", WRAPPED, "namespace-memo-trap.pth")
    assert fixes["S701"].endswith(f"ckptmove convert {tmp_path}/runs/namespace-memo-trap.pth --plain")


def test_objects_in_several_checkpoints_need_a_look_at_each(tmp_path):
    for name in ("a.pth", "b.pth"):
        shutil.copy(SAMPLES / "namespace-memo-trap.pth", tmp_path / name)
    fix = {one.code: one.fix for one in ckptmove.inspect(tmp_path).findings}["S701"]
    assert fix == f"ckptmove inspect '{tmp_path}/**'"


def test_compressed_records_in_several_checkpoints_need_a_look_at_each(tmp_path):
    for name in ("a.pth", "b.pth"):
        shutil.copy(SAMPLES / "zipped-again.pth", tmp_path / name)
    fix = {one.code: one.fix for one in ckptmove.inspect(tmp_path).findings}["F803"]
    assert fix == f"ckptmove inspect '{tmp_path}/**'"
