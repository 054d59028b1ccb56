"""Who may read a checkpoint may read its copies and reports, and nobody else."""

from __future__ import annotations

import os
import shutil
import stat
import zipfile
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"


@pytest.fixture(autouse=True)
def umask():
    """The usual umask."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(Path(path).stat().st_mode)


@pytest.mark.parametrize(("source", "copy"), [(0o600, 0o600), (0o666, 0o644), (0o4755, 0o755), (0o400, 0o400)])
def test_a_copy_has_the_mode_that_cp_gives(ask, bench, source, copy) -> None:
    (bench / "run.pth").chmod(source)
    assert ask("convert", "run.pth", "--to", "cpu", "-o", "new.pth")["ok"]
    assert mode("new.pth") == copy


@pytest.mark.parametrize(("before", "after"), [(0o666, 0o640), (0o600, 0o600), (0o444, 0o440)])
def test_a_replaced_file_keeps_its_mode_as_far_as_the_source_has_it(ask, bench, before, after) -> None:
    (bench / "run.pth").chmod(0o640)
    (bench / "new.pth").touch()
    (bench / "new.pth").chmod(before)
    assert ask("convert", "run.pth", "--to", "cpu", "-o", "new.pth", "--force")["ok"]
    assert mode("new.pth") == after


def test_in_place_it_stays(ask, bench) -> None:
    (bench / "run.pth").chmod(0o640)
    assert ask("convert", "run.pth", "--to", "cpu", "--in-place")["ok"]
    assert ask("convert", "run.pth", "--undo")["ok"]
    assert mode("run.pth") == 0o640


def test_a_directory_keeps_the_modes_of_its_files_and_folders(ask, bench) -> None:
    shutil.copytree(SAMPLES / "hf-trainer-cuda3", bench / "run")
    (bench / "run").chmod(0o777)
    (bench / "run" / "optimizer.pt").chmod(0o600)
    assert ask("convert", "run", "--to", "cpu")["ok"]
    assert (mode("run.cpu"), mode("run.cpu/optimizer.pt"), mode("run.cpu/scheduler.pt")) == (0o755, 0o600, 0o644)
    (bench / "run.cpu").chmod(0o700)
    assert ask("convert", "run", "--to", "cpu", "--force")["ok"]
    assert mode("run.cpu") == 0o700


def test_files_that_become_one_give_it_the_strictest_mode(ask, bench) -> None:
    shutil.copytree(SAMPLES / "hf-trainer-cuda3", bench / "run")
    for file in (bench / "run").iterdir():
        file.chmod(0o644)
    (bench / "run" / "optimizer.pt").chmod(0o600)
    assert ask("convert", "run", "-o", "run.pth", "--force")["ok"]
    assert mode("run.pth") == 0o600


@pytest.mark.parametrize(("source", "folder", "file"), [(0o600, 0o700, 0o600), (0o644, 0o755, 0o644)])
def test_shards_have_the_mode_of_their_source(ask, bench, source, folder, file) -> None:
    (bench / "run.pth").chmod(source)
    assert ask("convert", "run.pth", "--as-root", "model", "-o", "new/", "--shard-size", "1KB")["ok"]
    assert mode("new") == folder
    assert {mode(one) for one in (bench / "new").iterdir()} == {file}


def test_an_archive_gives_its_mode_to_what_is_taken_out(ask, bench) -> None:
    with zipfile.ZipFile("run.zip", "w") as whole:
        whole.write(SAMPLES / "weights.safetensors", "in/model.safetensors")
        whole.writestr("in/sub/config.json", "{}")
    (bench / "run.zip").chmod(0o600)
    assert ask("convert", "run.zip", "-o", "new/", "--shard-size", "1KB")["ok"]
    assert {mode(one) for one in (bench / "new").rglob("*")} == {0o600, 0o700}


@pytest.mark.parametrize("kind", ["html", "junit", "sarif"])
def test_a_report_is_not_wider_than_any_of_its_checkpoints(say, bench, kind) -> None:
    (bench / "run.pth").chmod(0o640)
    (bench / "dragged.pth").chmod(0o604)
    say("inspect", "run.pth", "dragged.pth", "--report", f"{kind}=report")
    assert mode("report") == 0o600
    (bench / "run.pth").chmod(0o777)
    (bench / "report").unlink()
    say("inspect", "run.pth", "--report", f"{kind}=report")
    assert mode("report") == 0o644


def test_nor_than_a_file_in_a_directory(say, bench) -> None:
    shutil.copytree(SAMPLES / "hf-trainer-cuda3", bench / "run")
    (bench / "run" / "optimizer.pt").chmod(0o600)
    say("inspect", "run", "--report", "html=report")
    assert mode("report") == 0o600
