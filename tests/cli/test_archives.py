"""Archives of checkpoints through the command line: renderings, exit codes, hints."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tarfile
import zipfile

import pytest


@pytest.fixture
def model(bench):
    """A zip of two checkpoints, and of a file that is none."""
    path = bench / "model.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(bench / "run.pth", "policy.pth")
        archive.write(bench / "dragged.pth", "best/policy.pth")
        archive.writestr("\x1b[2Jdata", "{}")
        archive.writestr("_stable_baselines3_version", "2.3.2")
    return path


def test_people_see_every_member_with_its_role(say, model) -> None:
    said = say("inspect", "model.zip", "--tree")
    assert said.code == 1
    lines = said.out.splitlines()
    assert lines[0] == "model.zip"
    assert lines[1].startswith("archive, stable-baselines3, ")
    assert [" ".join(line.split()) for line in lines[3:6]] == [
        "file roles layout devices tensors bytes",
        "best/policy.pth model, optimizer, rng, scheduler, scaler plain cuda:0 18 16.6 KiB",
        "policy.pth model, optimizer, scheduler plain cuda:3, cpu 16 6.8 KiB",
    ]
    assert "archive (4)" in lines
    assert "\x1b[2J" not in said.out
    assert said.err == "next: ckptmove convert model.zip --to cuda:0\n"


def test_programs_see_them_too(ask, bench, model) -> None:
    (checkpoint,) = ask("inspect", "model.zip")["checkpoints"]
    assert (checkpoint["container"], checkpoint["layout"]) == ("archive", "stable-baselines3")
    assert checkpoint["size_bytes"] == model.stat().st_size
    assert checkpoint["files"][1] == {
        "path": "policy.pth",
        "roles": ["model", "optimizer", "scheduler"],
        "container": "torch-zip",
        "layout": "plain",
        "size_bytes": (bench / "run.pth").stat().st_size,
        "tensors": 16,
        "devices": ["cuda:3", "cpu"],
    }


def test_an_archive_is_converted_and_looked_at(say, ask, model) -> None:
    said = say("convert", "model.zip", "--to", "cpu")
    assert said.code == 0
    assert "wrote model.cpu.zip: " in said.out
    assert said.err == "next: ckptmove verify model.cpu.zip --to cpu\n"
    assert say("inspect", "model.cpu.zip", "--expect", "cpu", "--ignore", "D103").code == 0
    document = ask("convert", "model.zip", "--to", "cpu", "--force")
    assert document["output"] == "model.cpu.zip"
    assert {edit["storage"].partition("/")[0] for edit in document["plan"]["edits"]} == {"best", "policy.pth"}


def test_what_is_refused_in_a_tar_is_never_unpacked_outside_of_its_directory(say, bench) -> None:
    with tarfile.open(bench / "evil.tar", "w") as archive:
        for _ in range(2):
            archive.add(bench / "run.pth", "../evil.pth")
    said = say("inspect", "evil.tar")
    assert said.code == 3
    assert said.err.splitlines()[1].endswith(": python -m tarfile --filter data -e evil.tar evil.tar.unpacked")
    words = shlex.split(said.err.splitlines()[1].rpartition(": python ")[2])
    subprocess.run([sys.executable, *words], cwd=bench, capture_output=True, check=False)
    assert not (bench / "evil.pth").exists()


def test_a_password_is_asked_for_by_unzip(say, bench, model) -> None:
    data = bytearray(model.read_bytes())
    data[bytes(data).rindex(b"best/policy.pth") - 46 + 8] |= 1
    model.write_bytes(data)
    said = say("inspect", "model.zip")
    assert (said.code, said.err.splitlines()) == (
        3,
        [
            "error: model.zip: not read as it is: member 'best/policy.pth' is encrypted",
            "hint: unpack it, then take the directory: unzip model.zip -d model.zip.unpacked",
        ],
    )


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_a_healthy_archive_is_verified_next(say, bench, form) -> None:
    path = bench / f"ok.{form}"
    with zipfile.ZipFile(path, "w") if form == "zip" else tarfile.open(path, "w") as archive:
        (archive.write if form == "zip" else archive.add)(bench / "run.pth", "run.pth")
    said = say("inspect", path.name, "--select", "O")
    assert (said.code, said.err) == (0, f"next: ckptmove verify {path.name}\n")
