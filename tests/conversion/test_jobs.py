"""A directory becomes one file: several threads write the same bytes as one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import zero_runs
from distributed_checkpoints import Distributed

import ckptmove
from ckptmove.errors import CrcMismatch
from ckptmove.io.at_once import Workers

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


def distributed(folder):
    tensors = {f"layers.{index}.weight": torch.randn(300, 1000) for index in range(9)}
    return Distributed.save(folder, {"model": tensors, "step": 3})


def sharded(folder):
    return Path(shutil.copytree(SAMPLES / "sharded-two-gpus", folder))


RUNS = {
    "dcp": distributed,
    "shards": sharded,
    "zero2": lambda folder: zero_runs.made(folder, stage=2, ranks=3),
    "zero3": lambda folder: zero_runs.made(folder, stage=3, ranks=3),
}


@pytest.mark.parametrize("options", [{}, {"check": False}, {"dtype": "bfloat16"}], ids=["checked", "unchecked", "cast"])
@pytest.mark.parametrize("kind", RUNS)
def test_the_bytes_do_not_depend_on_the_jobs(tmp_path, monkeypatch, kind, options):
    used, run_all = [], Workers.run
    monkeypatch.setattr(Workers, "run", lambda self, call, jobs: used.append(jobs) or run_all(self, call, jobs))
    run, written = RUNS[kind](tmp_path / "run"), []
    for jobs in (1, 2, 5):
        output = tmp_path / f"{jobs}" / "run.pth"
        output.parent.mkdir()
        result = ckptmove.convert(run, output=output, jobs=jobs, **options)
        assert result.bytes_copied == output.stat().st_size
        written.append(output.read_bytes())
    assert written[0] == written[1] == written[2]
    assert used == [2, 5]


def test_a_table_of_one_file(tmp_path):
    run, written = sharded(tmp_path / "run"), []
    for jobs in (1, 4):
        output = tmp_path / f"{jobs}.safetensors"
        ckptmove.convert(run, output=output, jobs=jobs)
        written.append(output.read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_damaged_piece_stops_all(tmp_path, jobs):
    run = distributed(tmp_path / "run")
    path = next(run.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CrcMismatch):
        ckptmove.convert(run, output=tmp_path / "run.pth", jobs=jobs)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]
