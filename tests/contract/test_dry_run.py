"""A dry run refuses what the conversion refuses: each specimen, cut off at several places, alone and among others."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

import ckptmove
from ckptmove.api.failures import failure_of
from ckptmove.errors import CkptMoveError
from ckptmove.formats.facts import facts_of
from ckptmove.io import segments

SAMPLES = Path(__file__).parents[2] / "sample_ckpts"
SHARES = (0.3, 0.6, 0.9, 0.97, 0.999, 1)


def answer(path, to="cuda:0", **options):
    """Exit code and output of a conversion."""
    try:
        ckptmove.convert(str(path), to=to, **options)
    except CkptMoveError as error:
        return failure_of(error).exit_code, error.message
    return 0, ""


def answers(path):
    """Those of a dry run, and of the conversion."""
    output = str(path.parent / "output")
    return answer(path, output=output, dry_run=True), answer(path, output=output, force=True)


def alone(path, data):
    path.write_bytes(data)
    return path


def in_a_directory(path, data):
    path.with_suffix("").mkdir(exist_ok=True)
    shutil.copy(SAMPLES / "adamw-cuda3.pth", path.with_suffix("") / "sound.pth")
    (path.with_suffix("") / "cut.pth").write_bytes(data)
    return path.with_suffix("")


def in_a_zip(path, data):
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(SAMPLES / "adamw-cuda3.pth", "sound.pth")
        archive.writestr("cut.pth", data)
    return path


def in_a_tar(path, data):
    with tarfile.open(path, "w") as archive:
        archive.add(SAMPLES / "adamw-cuda3.pth", "sound.pth")
        member = tarfile.TarInfo("cut.pth")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.unmeasured
@pytest.mark.parametrize("place", [alone, in_a_directory, in_a_zip, in_a_tar])
def test_a_file_that_is_cut_off_is_refused_by_both(opened, tmp_path, place):
    data, facts = opened.path.read_bytes(), facts_of(opened.container.name)
    codes = []
    for share in SHARES if place is alone else SHARES[1::4]:
        dry, real = answers(place(tmp_path / "made.pt", data[: int(len(data) * share)]))
        assert dry == real, share
        codes.append(real[0])
    is_written = facts.is_written or (bool(facts.rewritten_as) and place is alone)
    assert codes[-1] == (0 if is_written else 4)
    assert 3 in codes


@pytest.mark.unmeasured
def test_a_file_that_is_cut_off_is_refused_by_both_in_place(opened, tmp_path):
    data = opened.path.read_bytes()
    for share in SHARES:
        cut = alone(tmp_path / "made.pt", data[: int(len(data) * share)])
        assert answer(cut, in_place=True, dry_run=True) == answer(cut, in_place=True), share


def test_a_header_of_another_record_is_refused_by_both(tmp_path):
    data = bytearray((SAMPLES / "adamw-cuda3.pth").read_bytes())
    data[data.index(b"data/4") + 5] ^= 1
    dry, real = answers(alone(tmp_path / "made.pt", data))
    assert dry == real
    assert "data/4' belongs to another" in real[1]


@pytest.mark.parametrize("is_cast", [True, False])
def test_what_is_not_there_to_be_cast_is_refused_by_both(tmp_path, is_cast):
    """Neither refuses a missing storage that is not cast."""
    path = tmp_path / "made.pt"
    sample = "float64-cpu.pt" if is_cast else "adamw-cuda3.pth"
    with zipfile.ZipFile(SAMPLES / sample) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if "/data/" not in name:
                new.writestr(name, old.read(name))
    codes = [answer(path, "mps", cast=True, output=str(tmp_path / "out"), dry_run=one)[0] for one in (True, False)]
    assert codes == ([3, 3] if is_cast else [0, 0])


def test_a_dry_run_reads_no_tensor_that_is_to_be_cast(tmp_path, monkeypatch):
    """A conversion reads a cast storage, to compute its CRC; a dry run does not."""
    read = []
    real = segments.blocks_of
    monkeypatch.setattr(segments, "blocks_of", lambda *where, **options: read.append(where) or real(*where, **options))
    for dry_run in (True, False):
        output = str(tmp_path / "out")
        assert answer(SAMPLES / "float64-cpu.pt", "mps", cast=True, output=output, dry_run=dry_run) == (0, "")
        assert bool(read) is not dry_run


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_would_be_replaced_is_said_in_a_dry_run(tmp_path, force):
    path = Path(shutil.copy(SAMPLES / "adamw-cuda3.pth", tmp_path / "run.pth"))
    output = tmp_path / "run.cpu.pth"
    told = f"{output} already exists: force=True replaces it"
    assert told not in ckptmove.convert(path, to="cpu", dry_run=True).notes
    output.write_bytes(b"")
    assert (told in ckptmove.convert(path, to="cpu", dry_run=True, force=force).notes) is not force
