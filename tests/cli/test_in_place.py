"""``convert --in-place`` and ``--undo``: reports, refusals and locks."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_ckpts"
TIMING = re.compile(r"in \d+\.\d+ s")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def original(bench):
    return (bench / "run.pth").read_bytes()


def test_the_file_itself_is_changed_and_taken_back(ask, bench, original) -> None:
    document = ask("convert", "run.pth", "--to", "cpu", "--in-place")
    assert (document["output"], document["in_place"]) == ("run.pth", True)
    assert document["bytes_copied"] == (bench / "run.pth").stat().st_size - len(original)
    [note] = document["notes"]
    assert note.endswith(": ckptmove convert run.pth --undo")
    assert {edit["to"] for edit in document["plan"]["edits"]} == {"cpu"}
    (checkpoint,) = ask("inspect", "run.pth", "--expect", "cpu", "--check")["checkpoints"]
    assert checkpoint["expected"]["met"]
    assert ask("convert", "run.pth", "--undo", "--dry-run")["output"] is None
    assert (bench / "run.pth").read_bytes() != original
    document = ask("convert", "run.pth", "--undo")
    assert (document["plan"], document["output"], document["in_place"]) == (None, "run.pth", True)
    assert (bench / "run.pth").read_bytes() == original
    assert names(bench) == ["dragged.pth", "run.pth"]


def test_what_people_read(say, bench) -> None:
    said = say("convert", "run.pth", "--to", "cpu", "--in-place")
    changed, note = TIMING.sub("in TIME", said.out).splitlines()[-2:]
    assert changed.endswith(" run.pth: 3.5 KiB in TIME")
    assert note.endswith(": ckptmove convert run.pth --undo")
    assert said.only_next == ["verify", "run.pth", "--to", "cpu"]
    assert say("convert", "run.pth", "--to", "cpu", "--in-place", "-q").out.startswith("run.pth: unchanged")
    assert say("convert", "run.pth", "--to", "mps", "--in-place", "--dry-run", "-q").out.startswith(
        "run.pth: nothing was written"
    )
    assert say("convert", "run.pth", "--undo", "--dry-run").out.startswith("run.pth: dry run, 3.5 KiB ")
    said = say("convert", "run.pth", "--to", "cuda:3", "--in-place", "-q")
    assert TIMING.sub("in TIME", said.out).endswith(" run.pth: 0 B in TIME\n")
    said = say("convert", "run.pth", "--to", "mps", "--in-place", "--format", "github")
    assert said.out.startswith("::notice file=run.pth,title=convert::")
    line = "run.pth: restored to the original, 3.5 KiB removed"
    assert say("convert", "run.pth", "--undo", "--format", "github").out == (
        f"::notice file=run.pth,title=convert::{line}\n"
    )
    say("convert", "run.pth", "--to", "cpu", "--in-place")
    assert say("convert", "run.pth", "--undo").out == f"{line}\n"


def test_back_to_where_it_was_is_the_old_file(ask, bench, original) -> None:
    ask("convert", "run.pth", "--to", "cpu", "--in-place")
    document = ask("convert", "run.pth", "--to", "cuda:3", "--in-place")
    [note] = document["notes"]
    assert "--undo" not in note
    assert "byte for byte" in note
    assert (bench / "run.pth").read_bytes() == original


def test_many_times_over_it_does_not_grow(ask, bench, original) -> None:
    sizes = set()
    for _ in range(3):
        for device in ("cpu", "cuda:0", "mps"):
            ask("convert", "run.pth", "--to", device, "--in-place")
            sizes.add((device, (bench / "run.pth").stat().st_size))
    assert len(sizes) == 3
    ask("convert", "run.pth", "--undo")
    assert (bench / "run.pth").read_bytes() == original


def test_inspect_says_what_is_kept_and_minds_nothing_else(ask) -> None:
    before = ask("inspect", "run.pth", "--check")["checkpoints"][0]["findings"]
    ask("convert", "run.pth", "--to", "cuda:2", "--in-place")
    (checkpoint,) = ask("inspect", "run.pth", "--check")["checkpoints"]
    kept = [finding for finding in checkpoint["findings"] if finding["code"] == "F804"]
    assert len(kept) == 1
    assert kept[0]["message"].endswith(" convert run.pth --undo")
    assert not kept[0]["fix"]
    assert {one["code"] for one in checkpoint["findings"]} == {one["code"] for one in before} | {"F804"}


def test_in_a_directory_the_file_is_named(ask, bench) -> None:
    (bench / "run" / "inside").mkdir(parents=True)
    shutil.copy(bench / "run.pth", bench / "run" / "inside")
    ask("convert", "run/inside/run.pth", "--to", "cuda:0", "--in-place")
    (checkpoint,) = ask("inspect", "run/")["checkpoints"]
    (kept,) = [finding for finding in checkpoint["findings"] if finding["code"] == "F804"]
    assert kept["where"] == ["inside/run.pth"]
    assert kept["message"].endswith(" convert run/inside/run.pth --undo")
    copied = ask("convert", "run", "--to", "cpu")
    assert copied["output"] == "run.cpu"
    (checkpoint,) = ask("inspect", "run.cpu")["checkpoints"]
    assert not [finding for finding in checkpoint["findings"] if finding["code"] == "F804"]


@pytest.mark.parametrize(
    "words",
    [
        ("--to", "cpu", "--in-place", "-o", "new.pth"),
        ("--to", "cpu", "--in-place", "--force"),
        ("--to", "cpu", "--in-place", "--no-check"),
        ("--undo", "--to", "cpu"),
        ("--undo", "--map", "cuda:*=cpu"),
        ("--undo", "--keep", "model.*"),
        ("--undo", "-o", "new.pth"),
        ("--undo", "--in-place"),
        ("--undo", "--cast"),
        ("--undo", "--rewrite-strings"),
        ("--undo", "--no-check"),
        ("--in-place",),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(ask, bench, words) -> None:
    assert ask("convert", "run.pth", *words)["exit_code"] == 2
    assert names(bench) == ["dragged.pth", "run.pth"]


def test_a_configured_target_does_not_hinder_an_undo(ask, bench) -> None:
    (bench / "pyproject.toml").write_text("[tool.ckptmove]\nto = 'cpu'\ncheckpoints = ['run.pth']\n")
    assert ask("convert", "--in-place")["output"] == "run.pth"
    assert ask("convert", "--undo")["ok"]


@pytest.mark.parametrize(
    ("sample", "words", "message"),
    [
        ("float64-cpu.pt", ("--to", "mps", "--cast"), "--cast changes"),
        ("legacy-adamw-cuda1.pth", ("--to", "cpu"), "another length"),
        ("bare-pickle-cuda2.pkl", ("--to", "cpu"), "another length"),
        (".", ("--to", "cpu"), "it is a directory"),
        ("zipped-again.pth", ("--to", "mps"), "its storages are compressed"),
    ],
)
def test_what_has_no_room_is_refused_with_the_way(ask, bench, sample, words, message) -> None:
    (bench / "one").mkdir()
    copied = shutil.copy(SAMPLES / ("adamw-cuda3.pth" if sample == "." else sample), "one")
    path = "one" if sample == "." else copied
    for more in ((), ("--dry-run",)):
        error = ask("convert", path, *words, "--in-place", *more)["error"]
        assert (error["kind"], error["exit_code"], error["path"]) == ("in-place-impossible", 4, path)
        assert message in error["message"]
        typed = shlex.split(error["hint"].rpartition(": ")[2])
        assert typed == ["ckptmove", "convert", path, *words, *more, "--json"]


def test_a_legacy_file_whose_pickle_keeps_its_length(ask, bench) -> None:
    shutil.copy(SAMPLES / "legacy-adamw-cuda1.pth", "old.pth")
    before = (bench / "old.pth").read_bytes()
    document = ask("convert", "old.pth", "--to", "cuda:0", "--in-place")
    assert "no undo" in document["notes"][0]
    assert (bench / "old.pth").stat().st_size == len(before)
    assert ask("inspect", "old.pth", "--expect", "cuda:0")["ok"]
    error = ask("convert", "old.pth", "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("nothing-to-undo", 4)
    assert "earlier state" in error["message"]
    ask("convert", "old.pth", "--to", "cuda:1", "--in-place")
    assert (bench / "old.pth").read_bytes() == before


def test_without_devices_there_is_nothing_to_do(ask, bench) -> None:
    shutil.copy(SAMPLES / "weights.safetensors", "weights.safetensors")
    before = (bench / "weights.safetensors").stat()
    document = ask("convert", "weights.safetensors", "--to", "cuda:0", "--in-place")
    assert (document["ok"], document["bytes_copied"]) == (True, 0)
    assert "safetensors" in document["notes"][0]
    assert (bench / "weights.safetensors").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("path", ["run.pth", "."])
def test_what_was_never_converted_cannot_be_undone(ask, path) -> None:
    error = ask("convert", path, "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("nothing-to-undo", 4)
    words = "convert it back" if path == "run.pth" else "the original is unchanged"
    assert error["hint"].startswith(words)


def refuse_writing(monkeypatch, code):
    real = os.open

    def refuse(path, flags, *rest, **options):
        if flags & (os.O_RDWR | os.O_WRONLY) and not str(path).startswith("/dev"):
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.EACCES, "make it writable"),
        (errno.EROFS, "make it writable"),
        (errno.ENOSPC, "free some space"),
        (errno.EIO, "ckptmove inspect run.pth"),
    ],
)
def test_what_cannot_be_written(ask, bench, original, monkeypatch, code, hint) -> None:
    refuse_writing(monkeypatch, code)
    error = ask("convert", "run.pth", "--to", "cpu", "--in-place")["error"]
    assert (error["kind"], error["exit_code"]) == ("change-failed", 5)
    assert os.strerror(code) in error["message"]
    assert hint in error["hint"]
    assert (bench / "run.pth").read_bytes() == original


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_what_is_to_be_done_helps_an_undo_too(ask, bench, original, monkeypatch, code) -> None:
    """The error names the typed command: ``--undo`` accepts no option of a conversion."""
    ask("convert", "run.pth", "--to", "cpu", "--in-place")
    changed = (bench / "run.pth").read_bytes()
    with monkeypatch.context() as patches:
        refuse_writing(patches, code)
        hints = {
            ask("convert", "run.pth", *words)["error"]["hint"] for words in (("--undo",), ("--to", "mps", "--in-place"))
        }
    [hint] = hints
    assert "copy" in hint
    assert "--" not in hint
    shutil.copy("run.pth", "copy.pth")  # as it says
    assert (bench / "copy.pth").read_bytes() == changed
    ask("convert", "copy.pth", "--undo")
    assert (bench / "copy.pth").read_bytes() == original


#: Kills the process, or waits for a line, instead of one of the calls that write. The first argument is its index.
BREAK_OFF = """
import os, signal, sys

PLACE, WAY = int(sys.argv[1]), sys.argv[2]
seen = 0

def stop():
    if WAY == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    print("ready", file=sys.stderr, flush=True)
    sys.stdin.readline()

def counted(real):
    def call(*args, **options):
        global seen
        seen += 1
        if seen == PLACE:
            stop()
        return real(*args, **options)
    return call

for name in ("write", "fsync", "ftruncate", "unlink"):
    setattr(os, name, counted(getattr(os, name)))
"""
MAIN = """
sys.argv[1:] = sys.argv[3:]
from ckptmove.cli.app import main
main()
"""


def started(place, way, *words, **streams):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BREAK_OFF + MAIN, str(place), way, *words]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **streams)


#: Before the journal is written, synced; before the file is, and is synced; before it is cut off; before the end.
@pytest.mark.unmeasured
@pytest.mark.parametrize("place", [1, 2, 4, 5, 6, 8])
def test_a_kill_is_noticed_by_the_next_command(say, ask, bench, place) -> None:
    ask("convert", "run.pth", "--to", "cuda:10", "--in-place")
    before = (bench / "run.pth").read_bytes()
    with started(place, "kill", "convert", "run.pth", "--to", "cpu", "--in-place", "-q") as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(names(bench)) == 3
    left = {name: (bench / name).read_bytes() for name in names(bench)}
    for words in (
        ("inspect", "run.pth"),
        ("diff", "run.pth", "dragged.pth"),
        ("verify", "run.pth"),
        ("convert", "run.pth", "--to", "mps", "--dry-run"),
        ("convert", "run.pth", "--to", "mps", "-o", "new.pth"),
        ("convert", "run.pth", "--to", "mps", "--in-place"),
    ):
        error = ask(*words)["error"]
        assert (error["kind"], error["exit_code"], error["path"]) == ("interrupted-conversion", 3, "run.pth")
        assert error["hint"].endswith(": ckptmove convert run.pth --undo")
    assert ask("convert", "run.pth", "--undo", "--dry-run")["ok"]
    assert left == {name: (bench / name).read_bytes() for name in names(bench)}
    document = ask("convert", "run.pth", "--undo")
    assert "interrupted" in document["notes"][0]
    assert (bench / "run.pth").read_bytes() == before
    assert names(bench) == ["dragged.pth", "run.pth"]
    assert ask("inspect", "run.pth")["ok"]


def broken_off(path, place=5):
    """Kill a conversion in place of a file."""
    with started(place, "kill", "convert", path, "--to", "cpu", "--in-place", "-q") as process:
        process.communicate()


def test_what_people_read_about_an_interrupted_conversion(say, bench, original) -> None:
    broken_off("run.pth")
    said = say("inspect", "run.pth", "dragged.pth")
    assert said.code == 3
    assert "dragged.pth" in said.out  # the others are reported
    said = say("convert", "run.pth", "--undo")
    assert said.out.splitlines()[1].endswith("rolls back a conversion in place that was interrupted")
    assert (bench / "run.pth").read_bytes() == original


@pytest.mark.parametrize("words", [("convert", "run", "--to", "mps"), ("diff", "run", "run"), ("verify", "run")])
def test_a_directory_with_such_a_file_is_not_read(ask, bench, words) -> None:
    (bench / "run").mkdir()
    for name in ("a.pth", "b.pth"):
        shutil.copy(bench / "run.pth", bench / "run" / name)
    broken_off("run/b.pth")
    before = {name: (bench / "run" / name).read_bytes() for name in names(bench / "run")}
    error = ask(*words)["error"]
    assert (error["kind"], error["exit_code"], error["path"]) == ("interrupted-conversion", 3, "run/b.pth")
    document = ask("inspect", "run")
    assert document["exit_code"] == 3
    assert [one["path"] for one in document["errors"]] == ["run/b.pth"]
    assert {file["path"] for file in document["checkpoints"][0]["files"]} == {"a.pth"}
    assert before == {name: (bench / "run" / name).read_bytes() for name in names(bench / "run")}


def test_an_interrupted_conversion_is_undone_alone(ask, bench, original) -> None:
    ask("convert", "run.pth", "--to", "cpu", "--in-place")
    converted = (bench / "run.pth").read_bytes()
    with started(5, "kill", "convert", "run.pth", "--to", "mps", "--in-place", "-q") as process:
        process.communicate()
    assert ask("convert", "run.pth", "--undo")["ok"]
    assert (bench / "run.pth").read_bytes() == converted
    ask("convert", "run.pth", "--undo")
    assert (bench / "run.pth").read_bytes() == original


def test_a_conversion_that_is_under_way_is_neither_disturbed_nor_read(ask, bench) -> None:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started(5, "wait", "convert", "run.pth", "--to", "cpu", "--in-place", "-q", **streams) as process:
        assert process.stderr.readline() == "ready\n"
        for words in (("inspect", "run.pth"), ("convert", "run.pth", "--undo"), ("convert", "run.pth", "--to", "cpu")):
            error = ask(*words)["error"]
            assert (error["kind"], error["exit_code"]) == ("being-converted", 4)
            assert error["hint"].startswith("wait")
        out, _ = process.communicate("go on\n")
    assert "run.pth: " in out
    assert ask("inspect", "run.pth", "--expect", "cpu")["ok"]
    assert names(bench) == ["dragged.pth", "run.pth"]


def test_what_cannot_be_rolled_back_names_the_journal_and_the_command(ask, bench, monkeypatch) -> None:
    with started(5, "kill", "convert", "run.pth", "--to", "cpu", "--in-place", "-q") as process:
        process.communicate()
    (journal,) = [name for name in names(bench) if name.endswith(".journal")]
    with monkeypatch.context() as patches:
        refuse_writing(patches, errno.EROFS)
        error = ask("convert", "run.pth", "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("rollback-failed", 5)
    assert journal in error["message"]
    assert error["hint"].endswith(" convert run.pth --undo")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_takes_it_back_at_once(bench, original, number) -> None:
    signals = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    signals += "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", signals + BREAK_OFF + MAIN, "5", "wait", "convert", "run.pth", "--to", "cpu"]
    with subprocess.Popen(
        [*command, "--in-place"], env=environment, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr.readline() == "ready\n"
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (bench / "run.pth").read_bytes() == original
    assert names(bench) == ["dragged.pth", "run.pth"]


def test_an_archive_of_checkpoints_is_neither_changed_nor_taken_back(ask, bench) -> None:
    with zipfile.ZipFile("model.zip", "w") as archive:
        archive.write("run.pth", "policy.pth")
    before = (bench / "model.zip").read_bytes()
    error = ask("convert", "model.zip", "--to", "cpu", "--in-place")["error"]
    assert (error["kind"], error["exit_code"]) == ("in-place-impossible", 4)
    assert "archive" in error["message"]
    error = ask("convert", "model.zip", "--undo")["error"]
    assert (error["kind"], error["exit_code"]) == ("nothing-to-undo", 4)
    assert (bench / "model.zip").read_bytes() == before


@pytest.mark.parametrize("words", [["run", "--to", "cpu", "--in-place"], ["--to", "cpu", "--in-place", "--", "run"]])
def test_a_directory_is_written_anew(say, monkeypatch, tmp_path, words) -> None:
    shutil.copytree(SAMPLES / "hf-trainer-cuda3", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    said = say("convert", *words)
    assert said.code == 4
    typed = shlex.split(said.err.rpartition(": ")[2])
    assert typed[0] == "ckptmove"
    assert say(*typed[1:]).code == 0
    assert (tmp_path / "run.cpu" / "optimizer.pt").exists()
