"""Failures of system calls and changes by other processes: one line, a hint, an exit code, and no lost data."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from system_calls import Counted, count, spread
from typer.testing import CliRunner

from ckptmove.cli.app import app
from ckptmove.io.leftovers import clear_leftovers

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_ckpts"
CODES = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG]


def say(*words):
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def held():
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def one_line(said, code, message="", hint=""):
    """An error is one line, and one with a hint."""
    assert (said.exit_code, said.stdout) == (code, "")
    error, told = said.stderr.splitlines()
    assert error.startswith("error: ")
    assert told.startswith("hint: ")
    assert message in error
    assert hint in told


@pytest.fixture(autouse=True)
def disk(tmp_path, monkeypatch):
    """A folder with a file and a directory."""
    shutil.copy(SAMPLES / "adamw-cuda3.pth", tmp_path / "run.pth")
    shutil.copytree(SAMPLES / "hf-trainer-cuda3", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


MODES = {
    "file": (["convert", "run.pth", "--to", "cpu", "-o", "out"], None),
    "force": (["convert", "run.pth", "--to", "cpu", "-o", "out", "--force"], "run.pth"),
    "kernel": (["convert", "run.pth", "--to", "cpu", "-o", "out", "--no-check"], None),
    "directory": (["convert", "run", "--to", "cpu", "-o", "out"], None),
    "directory-force": (["convert", "run", "--to", "cpu", "-o", "out", "--force"], "run"),
    "one-file": (["convert", "run", "-o", "out.pth", "--jobs", "2"], None),
}
#: Each mode with two of the codes, and the copy by the kernel, which falls back for some, with each. The complete test
#: has each mode with each code.
FAILURES = [
    (mode, code, lasting)
    for index, mode in enumerate(MODES)
    for turn, code in enumerate(CODES)
    for lasting in (False, True)
    if mode == "kernel" or (turn - index - 3 * lasting) % len(CODES) in spread(len(CODES), 1)
]


@pytest.mark.unmeasured
@pytest.mark.parametrize(("mode", "code", "lasting"), FAILURES)
def test_any_call_may_fail(mode, code, lasting):
    def refuse(*_call):
        raise OSError(code, os.strerror(code))

    def prepare():
        for path in Path().glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if there is not None:
            (shutil.copytree if Path(there).is_dir() else shutil.copy)(there, "out")

    words, there = MODES[mode]
    prepare()
    old = held()
    calls = count(lambda: say(*words))
    new = held()
    assert old != new
    for place in spread(calls, 3, last=6):
        prepare()
        with Counted(place, refuse, lasting=lasting).installed():
            said = say(*words)
        if lasting:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns about the files that it removes
                clear_leftovers(Path())
        if said.exit_code == 0:
            assert held() == new
            continue
        one_line(said, 5, os.strerror(code))
        assert held() == (new if "is complete" in said.stderr else old)


OUTPUTS = {
    "the path": (lambda: "run.pth", 4, "is the source"),
    "another spelling": (lambda: "run/../run.pth", 4, "is the source"),
    "a symbolic link to it": (lambda: Path("link.pth").symlink_to("run.pth") or "link.pth", 4, "is the source"),
    "a hard link to it": (lambda: os.link("run.pth", "hard.pth") or "hard.pth", 4, "is the source"),
    "a directory": (lambda: "run", 4, "the output is a folder"),
    "a named pipe": (lambda: os.mkfifo("pipe.pth") or "pipe.pth", 5, "neither a regular file nor a link"),
    "a device": (lambda: "/dev/null", 5, "neither a regular file nor a link"),
    "a name too long": (lambda: "x" * 300, 5, "File name too long"),
    "a folder that is not there": (lambda: "gone/out.pth", 5, "No such file or directory"),
    "below a file": (lambda: "run.pth/out.pth", 5, "Not a directory"),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("output", OUTPUTS)
def test_what_is_no_place_for_an_output(disk, output, force):
    make, code, message = OUTPUTS[output]
    name = make()
    before = {path: path.lstat().st_ino for path in disk.rglob("*")}, (disk / "run.pth").read_bytes()
    said = say("convert", "run.pth", "--to", "cpu", "-o", name, *(["--force"] if force else []))
    is_special = "regular file" in message
    one_line(said, *((4, "already exists") if is_special and not force else (code, message)))
    assert before == ({path: path.lstat().st_ino for path in disk.rglob("*")}, (disk / "run.pth").read_bytes())


@pytest.mark.parametrize("output", ["run", "run/inside", "link", "."])
def test_what_is_no_place_for_a_directory(disk, output):
    Path("link").symlink_to("run")
    before = held()
    one_line(say("convert", "run", "--to", "cpu", "-o", output, "--force"), 4)
    assert held() == before


def replaced():
    Path("other").write_bytes(b"another run")
    Path("other").replace("run.pth")


def grown():
    with Path("run.pth").open("ab") as file:
        file.write(b"more")


def written_over():
    with Path("run.pth").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")


MEANWHILE = {
    "vanishes": (lambda: Path("run.pth").unlink(), 0),
    "is replaced": (replaced, 0),
    "grows": (grown, 3),
    "is written over": (written_over, 3),
    "shrinks": (lambda: os.truncate("run.pth", 1000), 3),
}


@pytest.mark.parametrize("options", [[], ["--no-check"]], ids=["checked", "kernel"])
@pytest.mark.parametrize("sample", ["adamw-cuda3.pth", "legacy-adamw-cuda1.pth"])
@pytest.mark.parametrize("change", MEANWHILE)
def test_a_source_that_changes_meanwhile(change, sample, options):
    make, code = MEANWHILE[change]
    shutil.copy(SAMPLES / sample, "run.pth")
    words = ["convert", "run.pth", "--to", "cpu", "-o", "out", *options]
    say(*words)
    whole = Path("out").read_bytes()
    Path("out").unlink()
    os.utime("run.pth", ns=(0, 0))

    def now(*_call):
        make()

    with Counted(2, now).installed():
        said = say(*words)
    if code:
        one_line(said, code)
        assert not Path("out").exists()
    else:
        assert said.exit_code == 0
        assert Path("out").read_bytes() == whole
    assert not list(Path().glob(".ckptmove-*"))


@pytest.mark.unmeasured
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("source", ["run.pth", "run"])
def test_two_processes_with_one_output(source, force):
    command = [sys.executable, "-m", "ckptmove", "convert", source, "-o", "out", *(["--force"] if force else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before = held()
    processes = [
        subprocess.Popen(
            [*command, "--to", to], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for to in ("cpu", "mps")
    ]
    said = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes
    assert set(codes) <= {0, 4}
    for code, (_, err) in zip(codes, said, strict=True):
        if code:
            assert "exists" in err or "another process" in err
    after = held()
    expected = []
    for to in ("cpu", "mps"):
        say("convert", source, "-o", "again", "--to", to, "--force")
        expected.append({path.replace("again", "out", 1): data for path, data in held().items() if "again" in path})
    assert {path: data for path, data in after.items() if path.startswith("out")} in expected
    assert {path: data for path, data in after.items() if not path.startswith("out")} == before
