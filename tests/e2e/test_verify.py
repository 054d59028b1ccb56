"""`verify` with its child process: real training, real files, injected faults."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from simulation import on_a_simulated_device

from ckptmove import convert
from ckptmove.errors import MissingFile, UsageError
from ckptmove.model import Severity
from ckptmove.proof.checks import CHECKS
from ckptmove.proof.errors import PackageMissing
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.run import verify_checkpoint

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


def verify(path, to=None, command=(), **options):
    return verify_checkpoint(VerifyRequest(path=str(path), to=to, **options), command)


def statuses(result):
    return {check.name: check.status for check in result.checks}


def failures(result):
    return [name for name, status in statuses(result).items() if status == "failed"]


@on_a_simulated_device
@pytest.mark.parametrize("devices", [None, 4, 8])
def test_a_checkpoint_from_a_gpu_that_is_not_here_resumes_on_a_simulated_one(devices):
    result = verify(SAMPLES / "adamw-cuda3.pth", devices=devices)
    assert (result.target, result.mode, result.passed) == ("cuda:3", "simulated", True)
    assert tuple(check.name for check in result.checks) == CHECKS
    assert set(statuses(result).values()) == {"passed"}
    assert "(simulated)" in next(check.detail for check in result.checks if check.name == "step")
    severities = [finding.severity for finding in result.findings if finding.code == "D103"]
    assert severities == ([Severity.INFO] if devices is None else [])


def test_a_target_that_the_user_names_has_that_many_devices():
    result = verify(SAMPLES / "adamw-cuda3.pth", to="cuda:3")
    assert "D103" not in {finding.code for finding in result.findings}


@on_a_simulated_device
def test_a_device_that_a_machine_with_one_lacks_fails_placement():
    result = verify(SAMPLES / "adamw-cuda3.pth", devices=1)
    assert (result.target, failures(result)) == ("cuda:3", ["placement"])
    detail = next(check.detail for check in result.checks if check.name == "placement")
    assert "(D103)" in detail
    assert detail.endswith("--to cuda:0")


def test_what_may_stay_may_lie_on_a_device_that_is_not_there(tmp_path):
    output = convert(SAMPLES / "adamw-cuda3.pth", to="cpu", keep=["model*"], output=tmp_path / "c.pth").output
    assert failures(verify(output, "cpu", keep=("model*",), devices=1)) == []
    assert failures(verify(output, "cpu", devices=1)) == ["placement"]
    assert failures(verify(output, "cpu")) == []


@pytest.mark.usefixtures("started_children")
def test_a_checkpoint_of_the_cpu():
    result = verify(SAMPLES / "tutorial-sgd-cpu.pth")
    assert (result.target, result.mode, result.passed) == ("cpu", "cpu", True)


def test_values_that_training_cannot_go_on_from_are_findings_too(tmp_path):
    tree = torch.load(SAMPLES / "tutorial-sgd-cpu.pth", weights_only=True)
    next(iter(tree["model_state_dict"].values()))[0] = torch.nan
    torch.save(tree, tmp_path / "nan.pth")
    result = verify(tmp_path / "nan.pth")
    assert not result.passed
    assert "numbers" in failures(result)
    assert "N501" in {finding.code for finding in result.findings}


def test_a_changed_byte_fails_the_file_check(tmp_path):
    path = tmp_path / "c.pt"
    torch.save({"model": {"a.weight": torch.arange(100.0)}}, path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("c/data/0").header_offset
    at = content.index(torch.arange(100.0).numpy().tobytes(), start)
    content[at + 50] ^= 1
    path.write_bytes(content)
    result = verify(path)
    assert failures(result) == ["file"]


@on_a_simulated_device
@pytest.mark.parametrize("to", [None, "cuda:0"])
def test_placement_fails_alone_and_only_for_what_torch_does_not_move(to):
    result = verify(SAMPLES / "map-location-dragged-all.pth", to)
    assert failures(result) == ["placement"]
    assert not result.passed
    for name in (
        "optimizer-left-on-cpu.pth",
        "criterion-on-cpu.pth",
        "tutorial-sgd-cpu.pth",
        "lightning-mapped-to-cpu.ckpt",
    ):
        assert (failures(result := verify(SAMPLES / name, to)), result.proven) == ([], True)


@pytest.mark.usefixtures("started_children")
@on_a_simulated_device
def test_a_conversion_verifies_against_its_original(tmp_path):
    from ckptmove.api.functions import convert

    original = str(SAMPLES / "map-location-dragged-all.pth")
    output = str(tmp_path / "out.pth")
    convert(original, to="mps", output=output)
    result = verify(output, against=original)
    assert (result.target, result.mode, result.passed) == ("mps", "simulated", True)


@pytest.mark.parametrize(("protocol", "tried"), [(2, False), (4, True)])
def test_a_pickle_whose_bytes_are_text_is_not_called_damaged(tmp_path, protocol, tried):
    """Protocols 0 to 2 have no bytes: they are written as text, which cannot be mapped."""
    checkpoint = torch.load(SAMPLES / "adamw-cuda3.pth", map_location="cpu")
    with (tmp_path / "a.pkl").open("wb") as file:
        pickle.dump({key: checkpoint[key] for key in ("model", "optimizer")}, file, protocol=protocol)
    result = verify(tmp_path / "a.pkl")
    assert (result.passed, statuses(result)["step"] == "passed", result.proven) == (True, tried, tried)
    assert statuses(result)["numbers"] == ("passed" if tried else "skipped"), "nothing was looked at"
    assert "protocol 4" in next(check.detail for check in result.checks if check.name == "step") or tried
    restore = next(check.detail for check in result.checks if check.name == "restore")
    assert ("16 text-encoded tensors left out" in restore) is not tried


def test_a_crash_of_the_child_is_a_failed_check():
    result = verify(SAMPLES / "adamw-cuda3.pth", "cuda:3", command=[sys.executable, "-c", "import os; os.abort()"])
    assert failures(result) == ["restore"]
    assert result.mode == "simulated"
    assert verify(SAMPLES / "tutorial-sgd-cpu.pth", command=["true"]).mode == "cpu"


def test_what_cannot_be_asked():
    with pytest.raises(UsageError):
        verify(SAMPLES / "adamw-cuda3.pth", optimizer="Lion")
    with pytest.raises(UsageError):
        verify(SAMPLES / "adamw-cuda3.pth", to="cudo")
    with pytest.raises(MissingFile):
        verify("nowhere.pth")
    with pytest.raises(MissingFile):
        verify(SAMPLES / "adamw-cuda3.pth", against="nowhere.pth")


@pytest.mark.slow
@pytest.mark.usefixtures("started_children")
def test_an_optimizer_of_the_folder_at_hand_is_stepped(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import torch\n\nclass Mine(torch.optim.SGD):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    result = verify(SAMPLES / "tutorial-sgd-cpu.pth", optimizer="mine:Mine")
    assert result.proven
    assert "mine:Mine on cpu" in next(check.detail for check in result.checks if check.name == "step")


def test_without_torch_it_says_so(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    with pytest.raises(PackageMissing):
        verify(SAMPLES / "adamw-cuda3.pth")


def test_the_parent_does_not_import_torch():
    code = (
        "import sys, json\n"
        "from ckptmove.training.run import verify_checkpoint\n"
        "from ckptmove.proof.request import VerifyRequest\n"
        f"result = verify_checkpoint(VerifyRequest(path={str(SAMPLES / 'tutorial-sgd-cpu.pth')!r}))\n"
        "print(json.dumps([result.passed, 'torch' in sys.modules]))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == [True, False]


def test_what_is_ignored_fails_nothing(tmp_path):
    path = tmp_path / "c.pt"
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg_sq"] = -state["state"][0]["exp_avg_sq"]
    state["state"][7] = {"exp_avg": torch.ones(2)}
    del state["state"][0]["exp_avg"]
    torch.save({"model": {"w": parameter.detach()}, "optimizer": state}, path)
    result = verify(path)
    assert {"structure", "numbers"} <= set(failures(result))
    assert {finding.code for finding in result.findings} >= {"O206", "O207", "N502"}
    result = verify(path, ignore=("O206", "O207", "N502"))
    assert not {"structure", "numbers"} & set(failures(result))
    assert not {finding.code for finding in result.findings} & {"O206", "O207", "N502"}


@pytest.mark.parametrize(
    ("name", "proven"),
    [("tutorial-sgd-cpu.pth", True), ("saved-view.pt", False)],
)
def test_only_a_step_proves(name, proven):
    result = verify(SAMPLES / name)
    assert result.proven is proven, result


def test_weights_of_safetensors_name_no_device_and_prove_no_resume():
    (sample,) = SAMPLES.glob("*.safetensors")
    result = verify(sample, "cuda:0")
    assert result.passed
    assert not result.proven
    assert statuses(result) == {
        "file": "passed", "restore": "passed", "placement": "skipped", "structure": "skipped", "numbers": "passed",
        "step": "skipped", "parity": "skipped", "fresh": "skipped",
    }  # fmt: skip
