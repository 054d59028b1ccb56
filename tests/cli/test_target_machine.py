"""Assumptions of ``inspect`` and ``verify`` about the target machine, and the device in their suggested commands."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ckptmove.api import functions as api
from ckptmove.model import Severity

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.suffix[:3] in {".pt", ".ck", ".pk"} or path.is_dir())
COMMAND = re.compile(r"ckptmove (?:convert|verify) [^\n;]*")
TARGET = re.compile(r"--to (\w+:?\d*)")


@pytest.mark.unmeasured
@pytest.mark.parametrize("devices", [None, 1, 8])
@pytest.mark.parametrize("name", [name for name in NAMES if "__" not in name])
def test_both_commands_judge_a_file_alike(name, devices):
    """The findings are the same, and *placement* fails for those that are errors."""
    pytest.importorskip("torch")
    from ckptmove.proof.file_checks import FAILED_BY, fail_on_findings
    from ckptmove.proof.opened import open_files
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.training.run import checks_without_torch

    path = str(SAMPLES / name)
    inspected = api.inspect(path, device_count=devices).findings
    asked = VerifyRequest(path=path, devices=devices)
    with open_files(asked) as opened:
        verified, checks = checks_without_torch(opened, None, asked)
    assert [(one.code, one.severity, one.fix) for one in verified] == [
        (one.code, one.severity, one.fix) for one in inspected
    ]
    placement = fail_on_findings(next(check for check in checks if check.name == "placement"), verified)
    errors = {one.code for one in inspected if one.severity is Severity.ERROR and FAILED_BY[one.code] == "placement"}
    assert (placement.status == "failed") == bool(errors), placement.detail


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", 0),
        ("--strict", 0),
        ("--devices 4", 0),
        ("--devices 8", 0),
        ("--devices 3", 1),
        ("--expect cuda:3", 0),
        ("--expect cuda:3 --strict", 0),
        ("--expect cuda:0", 1),
        ("--expect cuda:3 --devices 3", 1),
    ],
)
def test_a_file_of_another_gpu_is_healthy(ask, words, code):
    document = ask("inspect", "run.pth", *words.split())
    assert document["exit_code"] == code
    severities = {one["code"]: one["severity"] for one in document["checkpoints"][0]["findings"]}
    known = {"": "info", "--strict": "info", "--devices 3": "error", "--expect cuda:0": "error"}
    known["--expect cuda:3 --devices 3"] = "error"
    assert severities.get("D103") == known.get(words)


@pytest.mark.unmeasured
@pytest.mark.parametrize("words", [(), ("--devices", "8"), ("--to", "cuda:3"), ("--strict",)])
def test_a_file_of_another_gpu_resumes(ask, simulates, words):
    document = ask("verify", "run.pth", *words)
    (result,) = document["results"]
    assert (document["exit_code"], result["target"], result["proven"]) == (0, "cuda:3", True)


def commands(said):
    return COMMAND.findall(said.out + said.err)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("name", "words", "to"),
    [
        ("map-location-dragged-all.pth", (), "cuda:3"),
        ("map-location-dragged-all.pth", ("--devices", "4"), "cuda:3"),
        ("zipped-again.pth", (), "cuda:3"),
        ("zipped-again.pth", ("--devices", "2"), "cuda:0"),
        ("adamw-cuda3.pth", ("--devices", "2"), "cuda:0"),
    ],
)
def test_each_command_names_the_device_that_was_judged(say, bench, simulates, name, words, to):
    shutil.copy(SAMPLES / name, bench / "c.pth")
    verified = say("verify", "c.pth", "--to", "cuda:3", *words, "--junit", "r.xml")
    inspected = say("inspect", "c.pth", "--expect", "cuda:3", *words)
    assert verified.code == inspected.code == 1
    for found in (commands(verified), commands(inspected), COMMAND.findall((bench / "r.xml").read_text())):
        assert {TARGET.findall(one)[0] for one in found} == {to}


def test_without_a_target_the_device_of_the_model_is_judged(say, bench, simulates):
    moved = {"cuda:0": "cuda:3"}
    api.convert(str(SAMPLES / "map-location-dragged-all.pth"), map_location=moved, keep="rng.*", output="c.pth")
    for words, to in ((), "cuda:3"), (("--devices", "2"), "cuda:0"):
        for command in ("inspect", "verify"):
            said = say(command, "c.pth", *words, "--ignore", "D103")
            assert said.code == 1
            assert {TARGET.findall(one)[0] for one in commands(said)} == {to}


def test_the_next_step_for_a_script_of_another_order_has_the_target(say, bench):
    torch = pytest.importorskip("torch")
    saved = torch.load(SAMPLES / "adamw-cuda3.pth", map_location="cpu")
    state = saved["optimizer"]["state"]
    state[0], state[1] = state[1], state[0]
    torch.save(saved, bench / "c.pth")
    for words in ((), ("--expect", "cuda:3")):
        out = say("inspect", "c.pth", "--select", "O208", *words).out
        assert ("ckptmove verify c.pth --to cuda:3 --ignore O208" in out) == bool(words)
