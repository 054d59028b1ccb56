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
    """A zip of two checkpoints and another file."""
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
    assert [" ".join(line.split()) for line in lines[4:7]] == [
        "file roles layout devices tensors size",
        "best/policy.pth model, optimizer, rng, scheduler, scaler plain cuda:0 18 16.6 KiB",
        "policy.pth model, optimizer, scheduler plain cuda:3, cpu 16 6.8 KiB",
    ]
    assert "archive (4)" in lines
    assert "\x1b[2J" not in said.out
    assert said.only_next == ["convert", "model.zip", "--to", "cuda:0"]


def test_an_archive_of_two_checkpoints_is_called_one(say, bench) -> None:
    with zipfile.ZipFile(bench / "two.zip", "w") as archive:
        for name in ("run.pth", "dragged.pth"):
            archive.write(bench / name, name)
    [line] = [line for line in say("inspect", "two.zip").out.splitlines() if " 2 separate checkpoints" in line]
    assert line.startswith("the archive ")


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
    assert said.only_next == ["verify", "model.cpu.zip", "--to", "cpu"]
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
    assert said.err.splitlines()[1].endswith(
        ": python -m tarfile --filter data -e evil.tar evil.tar.unpacked && ckptmove inspect evil.tar.unpacked"
    )
    words = shlex.split(said.err.splitlines()[1].rpartition(": python ")[2].partition(" && ")[0])
    subprocess.run([sys.executable, *words], cwd=bench, capture_output=True, check=False)
    assert not (bench / "evil.pth").exists()


def test_a_password_is_asked_for_by_unzip(say, bench, model) -> None:
    data = bytearray(model.read_bytes())
    data[bytes(data).rindex(b"best/policy.pth") - 46 + 8] |= 1
    model.write_bytes(data)
    said = say("inspect", "model.zip")
    error, hint = said.err.splitlines()
    assert (said.code, error.split(": ")[:2]) == (3, ["error", "model.zip"])
    assert "'best/policy.pth' is encrypted" in error
    unzip = "unzip model.zip -d model.zip.unpacked && ckptmove inspect model.zip.unpacked"
    assert hint.startswith("hint: ")
    assert hint.endswith(f": {unzip}")


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_a_healthy_archive_is_verified_next(say, bench, form) -> None:
    path = bench / f"ok.{form}"
    with zipfile.ZipFile(path, "w") if form == "zip" else tarfile.open(path, "w") as archive:
        (archive.write if form == "zip" else archive.add)(bench / "run.pth", "run.pth")
    said = say("inspect", path.name, "--select", "O")
    assert (said.code, said.only_next) == (0, ["verify", path.name])


@pytest.mark.parametrize("form", ["zip", "tar"])
def test_an_archive_of_nothing_but_an_archive_says_how_to_come_to_that(say, bench, model, form) -> None:
    path = bench / f"outer.{form}"
    with zipfile.ZipFile(path, "w") if form == "zip" else tarfile.open(path, "w") as archive:
        (archive.write if form == "zip" else archive.add)(model, "a b.zip")
    hint = say("inspect", path.name).err.splitlines()[1]
    assert f" -e {path.name} {path.name}.unpacked && " in hint
    words = shlex.split(hint.partition(": python ")[2])
    cut = words.index("&&")
    subprocess.run([sys.executable, *words[:cut]], cwd=bench, capture_output=True, check=True)
    assert say(*words[cut + 2 :]).out.startswith(f"{path.name}.unpacked/a b.zip\n")


def test_a_tar_that_was_cut_before_its_first_checkpoint_is_said_to_be(say, bench) -> None:
    with tarfile.open(bench / "cut.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("README.txt"))
    data = (bench / "cut.tar").read_bytes()
    for length, is_cut in (512, True), (1024, False):
        (bench / "cut.tar").write_bytes(data[:length])
        said = say("inspect", "cut.tar")
        assert said.code == 3
        assert (" that is cut off, so members may be missing; " in said.err) == is_cut
        assert ("hint: it was cut off in transit: compare its size" in said.err) == is_cut
