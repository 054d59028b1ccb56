"""Each suggested next command runs, and does not fail by itself."""

from __future__ import annotations

import shlex
import shutil
import zipfile
from pathlib import Path

import pytest

from ckptmove.api import functions as api

SAMPLES = Path(__file__).resolve().parents[2] / "sample_ckpts"


@pytest.fixture
def follow(say):
    """Type a command, then the one that it names, and get that with its exit code."""

    def follow(*words):
        lines = say(*words).err.splitlines()
        [named] = [line.removeprefix("next: ckptmove ") for line in lines if line.startswith("next: ")]
        return named, say(*shlex.split(named)).code

    return follow


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("inspect run.pth", "verify run.pth"),
        ("inspect run.pth --devices 1", "convert run.pth --to cuda:0"),
        ("inspect two.pth --ignore D101,K601", "verify two.pth"),
        ("inspect run.pth --devices 4", "verify run.pth --devices 4"),
        ("inspect run.pth --devices 8", "verify run.pth --devices 8"),
        ("inspect run.pth --expect cuda:3", "verify run.pth --to cuda:3"),
        ("inspect run.pth --expect cuda:3 --devices 4", "verify run.pth --to cuda:3 --devices 4"),
        ("inspect run.pth --expect cuda:3 --devices 2", "convert run.pth --to cuda:0"),
        ("inspect cpu.pth --expect cuda:3", "convert cpu.pth --to cuda:3"),
        ("inspect cpu.pth --expect cuda:3 --devices 2", "convert cpu.pth --to cuda:0"),
        ("inspect run.pth --expect cpu", "convert run.pth --to cpu"),
        ("inspect cpu.pth", "verify cpu.pth"),
        ("convert run.pth --to cuda:3", "verify run.cuda3.pth --to cuda:3"),
        ("convert run.pth --to cpu --keep model.*", "verify run.cpu.pth --to cpu --keep 'model.*'"),
        ("convert run.pth --map cuda:3=cuda:2", "verify run.moved.pth"),
        ("convert run.pth --map cpu=cuda:0", "verify run.moved.pth"),
        ("convert cpu.pth --map cpu=cuda:1", "verify cpu.moved.pth"),
        ("convert run.pth --map cuda:3=mps", "verify run.moved.pth"),
        ("convert run.pth --to cuda:0 --map cuda:3=cuda:1", "verify run.cuda0.pth"),
        ("convert metric.pth --map cuda:3=cuda:2", "verify metric.moved.pth"),
        (
            "convert run.pth --map cuda:3=cuda:2 --keep *.exp_avg",
            "verify run.moved.pth --keep '*.exp_avg'",
        ),
    ],
)
def test_what_is_named_next_does_not_fail(follow, bench, words, named, simulates):
    api.convert("run.pth", to="cpu", output="cpu.pth")
    shutil.copy(SAMPLES / "dataparallel-two-gpus.pth", bench / "two.pth")
    torch = pytest.importorskip("torch")
    torch.save({**torch.load("cpu.pth"), "best": torch.tensor([0.5])}, bench / "cpu-metric.pth")
    api.convert("cpu-metric.pth", to="cuda:3", keep=["best"], output="metric.pth")
    assert follow(*words.split()) == (named, 0)


@pytest.mark.unmeasured
@pytest.mark.parametrize("mapping", ["cuda:1=cuda:3", "cuda:1=xpu"])
def test_what_a_mapping_leaves_on_several_devices_resumes(follow, bench, mapping, simulates):
    shutil.copy(SAMPLES / "dataparallel-two-gpus.pth", bench / "two.pth")
    assert follow("convert", "two.pth", "--map", mapping) == ("verify two.moved.pth", 0)


def test_what_a_mapping_leaves_unusable_is_not_to_be_verified(follow, bench):
    api.convert(SAMPLES / "pickled-module-cuda0.pt", map_location={}, keep="0.*", to="cpu", output=bench / "mixed.pt")
    assert follow("convert", "mixed.pt", "--map", "cpu=cuda:0", "--keep", "3.*") == ("inspect mixed.moved.pt", 1)


def test_a_tag_that_is_no_target_is_not_to_be_verified(follow, bench):
    with zipfile.ZipFile("run.pth") as old, zipfile.ZipFile("odd.pth", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"cuda:3", b"meta:3"))
    assert follow("convert", "odd.pth", "--map", "cpu=cuda:1")[0] == "inspect odd.moved.pth"
