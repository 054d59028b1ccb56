"""A killed process loses nothing: the source is unchanged, the output absent or complete, and the next run cleans up.

After SIGKILL, no handler of the program runs. The process is killed at system calls of all modes. `make crash` tries
every call, and 200 instants of whole processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import pytest
from system_calls import count, instants, kill_at, spread

from ckptmove.api import functions as api
from ckptmove.io.changes import InterruptedConversion
from ckptmove.io.outputs import LeftoversRemoved

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "sample_ckpts"
ZIP, LEGACY, FOLDER = "adamw-cuda3.pth", "legacy-adamw-cuda1.pth", "hf-trainer-cuda3"


def archive(folder):
    with zipfile.ZipFile(folder / "run", "w") as whole:
        for name in ("adam-mps.pt", ZIP):
            whole.write(SAMPLES / name, name)
        whole.writestr("notes.txt", "kept")


def sample(name):
    def make(folder):
        copy = shutil.copytree if (SAMPLES / name).is_dir() else shutil.copy
        copy(SAMPLES / name, folder / "run")

    return make


def convert(**options):
    return lambda: api.convert("run", to="cpu", output="out", **options)


def in_place(to):
    return lambda: api.convert("run", to=to, in_place=True)


#: The files, the steps before, and the step that is interrupted.
MODES = {
    "zip": (sample(ZIP), None, convert()),
    "kernel": (sample(ZIP), None, convert(check=False)),
    "legacy": (sample(LEGACY), None, convert()),
    "archive": (archive, None, convert()),
    "safetensors": (sample("weights.safetensors"), None, convert()),
    "force": (sample(ZIP), lambda: api.convert("run", to="mps", output="out"), convert(force=True)),
    "directory": (sample(FOLDER), None, convert()),
    "directory-force": (sample(FOLDER), lambda: api.convert("run", to="mps", output="out"), convert(force=True)),
    "in-place": (sample(ZIP), None, in_place("cpu")),
    "in-place-again": (sample(ZIP), in_place("mps"), in_place("cpu")),
    "undo": (sample(ZIP), in_place("mps"), lambda: api.undo("run")),
}


def held(folder="."):
    """Everything below a folder, hidden or not: bytes by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in Path(folder).rglob("*")
    }


def below(contents, name):
    """Content of a path: a file, or all files below it."""
    return {path: data for path, data in contents.items() if path == name or path.startswith(f"{name}/")}


def settled():
    """Read the file; undo its conversion if that was interrupted, and return the notes on that."""
    try:
        api.inspect("run")
    except InterruptedConversion:
        return api.undo("run").notes
    return ()


def hidden(contents):
    return [path for path in contents if path.startswith(".ckptmove")]


class Mode:
    """A change to break off, and the two states that it may leave."""

    def __init__(self, name, folder):
        make, before, self.change = MODES[name]
        self.name = name
        self.folder = folder / "disk"
        self._template = folder / "template"
        self._template.mkdir()
        self.folder.mkdir()
        os.chdir(self._template)
        make(self._template)
        if before is not None:
            before()
        self.old = held(self._template)
        self.put()
        self.calls = count(self.change)
        self.new = held(self.folder)

    def put(self):
        """Restore the folder."""
        os.chdir(self._template)
        shutil.rmtree(self.folder)
        shutil.copytree(self._template, self.folder)
        os.chdir(self.folder)

    def is_whole(self, contents):
        """Whether each file has its old or its new content."""
        output = "run" if "out" not in self.new else "out"
        assert below(contents, output) in (below(self.old, output), below(self.new, output))
        assert output == "run" or below(contents, "run") == below(self.old, "run")
        return contents in (self.old, self.new)

    def next_run(self):
        """Convert into the folder again; return the message about the earlier conversion."""
        said = settled()
        with warnings.catch_warnings(record=True) as removed:
            warnings.simplefilter("always")
            api.convert(str(SAMPLES / ZIP), to="cpu", output="other")
        Path("other").unlink()
        assert {one.category for one in removed} <= {LeftoversRemoved}
        return [*said, *(str(one.message) for one in removed)]


@pytest.fixture(params=MODES)
def mode(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Mode(request.param, tmp_path)


def test_wherever_it_is_killed_the_next_run_finds_all_of_it_and_clears_the_rest(mode):
    states = set()
    for place in spread(mode.calls, 5, last=7):
        mode.put()
        kill_at(place, mode.change)
        left = held()
        if not hidden(left):
            assert mode.is_whole(left)
        elif mode.name == "directory-force" and not below(left, "out"):
            (aside,) = [path for path in left if path.endswith(".old/out")]
            assert len(below(left, aside)) == len(below(mode.old, "out"))  # moved, and about to be put back
        elif "out" in mode.new:
            mode.is_whole(left)
        aside = [path for path in left if path.endswith(".old/out")]
        said = mode.next_run()
        if aside and not below(left, "out"):
            assert any(f"mv {mode.folder}/" in one or " mv " in one for one in said)
            Path(*aside).rename("out")  # as it says
            mode.next_run()
        assert mode.is_whole(held())
        # A lock alone has nothing of anybody: it is removed without a word.
        assert bool(said) == any(not path.endswith(".lock") for path in hidden(left))
        states.add(held() == mode.new)
    assert states == {False, True}


def test_what_is_whole_is_what_torch_loads(mode):
    torch = pytest.importorskip("torch")
    name = "out" if "out" in mode.new else "run"
    files = [path for path in below(held(), name) if Path(path).is_file() and not path.endswith(".json")]
    for file in files:
        if mode.name == "archive":
            with zipfile.ZipFile(file) as whole:
                whole.extractall("members")
            torch.load(f"members/{ZIP}", map_location="cpu", weights_only=True)
        elif mode.name == "safetensors":
            pytest.importorskip("safetensors.torch").load_file(file)
        else:
            torch.load(file, map_location="cpu", weights_only="rng" not in file)
    assert files


def test_a_directory_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample(FOLDER)(tmp_path)
    synced, taken = [], []
    sync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), sync(fd)))

    def noted(source, target, **options):
        rename(source, target, **options)
        taken.append(len(synced))

    monkeypatch.setattr(os, "rename", noted)
    monkeypatch.setattr(Path, "rename", noted)
    convert()()
    (before,) = taken
    assert {path.stat().st_ino for path in [Path("out"), *Path("out").rglob("*")]} <= set(synced[:before])
    assert synced[before:] == [tmp_path.stat().st_ino]


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that takes some time to write."""
    torch = pytest.importorskip("torch")
    (tmp_path / "disk").mkdir()
    monkeypatch.chdir(tmp_path / "disk")
    torch.save({"model": {str(i): torch.full((250_000,), float(i)) for i in range(40)}}, "run")
    return Path("run").read_bytes()


WORDS = {
    "file": ["--to", "cuda:0", "-o", "out"],
    "kernel": ["--to", "cuda:0", "-o", "out", "--no-check"],
    "force": ["--to", "cuda:0", "-o", "out", "--force"],
    "in-place": ["--to", "cuda:0", "--in-place"],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_whole_processes_are_killed_at_any_instant(large, words):
    command = [sys.executable, "-m", "ckptmove", "convert", "run", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    began = time.perf_counter()
    subprocess.run(command, check=True, **options)
    seconds = time.perf_counter() - began
    new = held()
    old = {"run": large, **({"out": b"old"} if "--force" in words else {})}
    tries = instants(3, 50)
    for step in range(tries):
        for path in Path().iterdir():
            path.unlink()
        for name, data in old.items():
            Path(name).write_bytes(data)
        with subprocess.Popen(command, **options) as process:
            time.sleep(seconds * (step + 1) / tries)
            process.send_signal(signal.SIGKILL)
        left = held()
        assert {name: data for name, data in left.items() if not name.startswith(".")} in (old, new) or "run" in new
        with warnings.catch_warnings(record=True) as removed:
            warnings.simplefilter("always")
            said = settled()
            api.convert(str(SAMPLES / ZIP), to="cpu", output="other")
        Path("other").unlink()
        assert held() in (old, new)
        # A lock alone has nothing of anybody: it is removed without a word.
        assert bool([*said, *removed]) == any(not path.endswith(".lock") for path in hidden(left))
