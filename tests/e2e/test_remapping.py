"""Whole command lines that remap a checkpoint, as a user runs them, and what torch and safetensors load afterwards."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wrapped import data_parallel_on_cpu  # noqa: F401  # a fixture for every test here

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.unmeasured

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run command lines in a folder of their own; none may fail or print a traceback."""
    monkeypatch.chdir(tmp_path)

    def run(*lines):
        for line in lines:
            done = subprocess.run(
                [sys.executable, "-m", "ckptmove", *line.split()], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in done.stderr

    return run


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def equal(one, other):
    assert list(one) == list(other)
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], rtol=0, atol=0, equal_nan=True)


def test_a_compiled_model_for_deployment(run) -> None:
    shutil.copy(SAMPLES / "nanogpt-compiled-fused.pt", "run.pt")
    run("convert run.pt --strip-prefix --only model -o lean.pt", "convert lean.pt --as-root model -o lean.safetensors")
    original = {key.removeprefix("_orig_mod."): tensor for key, tensor in load("run.pt")["model"].items()}
    equal(load("lean.pt")["model"], original)
    table = safetensors.load_file("lean.safetensors")
    for key, tensor in table.items():
        assert torch.equal(tensor, original[key])
    assert {tensor.data_ptr() for tensor in original.values()} == {original[key].data_ptr() for key in table}


def test_shards_and_back(run) -> None:
    shutil.copy(SAMPLES / "adamw-cuda3.pth", "run.pth")
    run("convert run.pth --as-root model --shard-size 0.2KB -o hub", "convert hub -o whole.pth")
    assert len(list(Path("hub").glob("*.safetensors"))) > 1
    whole, original = load("whole.pth"), load("run.pth")["model"]
    equal(dict(sorted(whole.items())), dict(sorted(original.items())))


def test_a_pickled_model_in_weights_only_mode(run) -> None:
    model = torch.nn.DataParallel(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
    torch.save(model, "model.pt")
    run("convert model.pt --plain --strip-prefix --dtype fp16 -o plain.pt")
    expected = {
        key: tensor.half() if tensor.is_floating_point() else tensor
        for key, tensor in model.module.state_dict().items()
    }
    equal(load("plain.pt"), expected)


def test_a_slice_of_a_large_tensor(run) -> None:
    torch.save({"rows": torch.arange(1_000_000.0)[5:10]}, "slice.pt")
    run("convert slice.pt --compact -o small.pt --verify", "verify small.pt --against slice.pt")
    assert Path("small.pt").stat().st_size < 10_000
    equal(load("small.pt"), load("slice.pt"))
    equal(torch.load("small.pt", mmap=True, weights_only=True), load("slice.pt"))


def test_a_folder_of_runs(run) -> None:
    for name in ("adamw-cuda3.pth", "tutorial-sgd-cpu.pth"):
        shutil.copy(SAMPLES / name, name)
    run(*["convert *.pth --drop optimizer* --to cpu --output-dir lean --skip-existing"] * 2)
    assert sorted(path.name for path in Path("lean").iterdir()) == ["adamw-cuda3.pth", "tutorial-sgd-cpu.pth"]
    equal(load("lean/adamw-cuda3.pth")["model"], load("adamw-cuda3.pth")["model"])
