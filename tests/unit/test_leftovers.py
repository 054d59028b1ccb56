"""What killed processes leave: removed or put back, and never what a live one is at."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from ckptmove.outputs import LeftoversRemoved
from ckptmove.streams import leftovers
from ckptmove.streams.directory_sink import DirectorySink
from ckptmove.streams.leftovers import (
    claimed_file,
    claimed_folder,
    clear_leftovers,
    is_temporary,
    temporary_names,
)
from ckptmove.streams.sink import FileSink


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def cleared(folder):
    """What is said of clearing up a folder."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        clear_leftovers(folder)
    assert all(one.category is LeftoversRemoved for one in said)
    return [str(one.message) for one in said]


@pytest.fixture
def pair(tmp_path):
    """The names of one conversion that nobody is at any more."""
    return temporary_names(tmp_path)


def filled(path, name="a.txt"):
    path.mkdir()
    (path / name).write_bytes(b"a")
    return path


def test_names_are_told_apart_from_all_others(tmp_path):
    first, second = temporary_names(tmp_path), temporary_names(tmp_path)
    assert len({*first, *second}) == 4
    assert all(is_temporary(path.name) and path.parent == tmp_path for path in (*first, *second))
    for other in ("run.part", ".ckptmove-00000000.journal", ".ckptmove-1.part", f"{first[0].name}.pth"):
        assert not is_temporary(other)


def test_a_file_is_removed(tmp_path, pair):
    pair[0].touch()
    assert cleared(tmp_path) == [f"{pair[0]}: left by a conversion that was broken off, and removed"]
    assert names(tmp_path) == []
    assert cleared(tmp_path) == []


def test_a_folder_is_removed(tmp_path, pair):
    filled(pair[0])
    assert len(cleared(tmp_path)) == 1
    assert names(tmp_path) == []


def test_what_was_moved_aside_is_put_back(tmp_path, pair):
    filled(pair[0])
    pair[1].mkdir()
    filled(pair[1] / "out")
    said = cleared(tmp_path)
    assert said[0].startswith(f"{tmp_path / 'out'}: a conversion that was to replace it was broken off")
    assert len(said) == 2
    assert names(tmp_path) == ["out", "out/a.txt"]


def test_what_was_about_to_be_moved_is_left(tmp_path, pair):
    filled(tmp_path / "out")
    filled(pair[0])
    pair[1].mkdir()
    assert len(cleared(tmp_path)) == 1
    assert names(tmp_path) == ["out", "out/a.txt"]


def test_what_was_replaced_is_removed(tmp_path, pair):
    filled(tmp_path / "out")
    pair[1].mkdir()
    filled(pair[1] / "out", "old.txt")
    (said,) = cleared(tmp_path)
    assert said.startswith(f"{pair[1]}: what a conversion had replaced")
    assert names(tmp_path) == ["out", "out/a.txt"]


def test_nothing_is_lost_where_the_name_is_taken(tmp_path, pair):
    filled(pair[0])
    pair[1].mkdir()
    filled(pair[1] / "out", "old.txt")
    filled(tmp_path / "out")
    before = names(tmp_path)
    for _ in range(2):
        (said,) = cleared(tmp_path)
        assert said.endswith("both are kept")
        assert names(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_live_process_has_claimed_stays(tmp_path, kind, pair):
    claim = {"file": claimed_file, "folder": claimed_folder}[kind](pair[0])
    assert cleared(tmp_path) == []
    assert names(tmp_path) == [pair[0].name]
    os.close(claim)
    assert len(cleared(tmp_path)) == 1


WRITER = """
import sys
from ckptmove.streams.sink import FileSink
with FileSink(sys.argv[1], force=False) as sink:
    sink.write(b"new")
    print("begun", flush=True)
    sys.stdin.read()
    sink.commit()
"""


def test_another_process_finishes_what_it_writes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "out.pt")],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "begun\n"
        assert cleared(tmp_path) == []
        process.communicate()
    assert process.returncode == 0
    assert names(tmp_path) == ["out.pt"]


def test_until_it_has_its_name_it_is_claimed(tmp_path, monkeypatch):
    said = []
    real = os.link

    def link(*args, **options):
        said.extend(cleared(tmp_path))
        real(*args, **options)

    monkeypatch.setattr(os, "link", link)
    with FileSink(str(tmp_path / "out.pt"), force=False) as sink:
        sink.commit()
    assert (said, names(tmp_path)) == ([], ["out.pt"])


def test_a_directory_is_claimed_and_so_is_what_it_replaces(tmp_path, monkeypatch):
    filled(tmp_path / "out")
    said, seen = [], []
    real = Path.rename

    def rename(self, target):
        real(self, target)
        said.extend(cleared(tmp_path))
        seen.append(sum(is_temporary(path.name) for path in tmp_path.iterdir()))

    monkeypatch.setattr(Path, "rename", rename)
    with DirectorySink(str(tmp_path / "out"), frozenset({"a.txt"}), force=True) as sink:
        sink.folder("", 0o755)
        sink.commit()
    assert (said, seen, names(tmp_path)) == ([], [2, 1], ["out"])


def of_another_machine(path):
    return path.with_name(f".ckptmove-{'0' * 8}-{path.name.split('-')[2]}")


def test_that_of_another_machine_has_to_be_still_for_a_day(tmp_path, pair):
    path = of_another_machine(pair[0])
    path.touch()
    assert cleared(tmp_path) == []
    long_ago = time.time() - 2 * 24 * 60 * 60
    os.utime(path, (long_ago, long_ago))
    assert len(cleared(tmp_path)) == 1
    assert names(tmp_path) == []


def test_that_of_another_user_stays(tmp_path, monkeypatch, pair):
    pair[0].touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cleared(tmp_path) == []
    assert names(tmp_path) == [pair[0].name]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_neither_file_nor_folder_stays(tmp_path, kind, pair):
    (tmp_path / "precious").write_bytes(b"kept")
    {"link": lambda path: path.symlink_to("precious"), "pipe": os.mkfifo}[kind](pair[0])
    assert cleared(tmp_path) == []
    assert names(tmp_path) == sorted([pair[0].name, "precious"])


@pytest.mark.parametrize("folder", ["gone", "a\0b"])
def test_a_folder_that_is_none(tmp_path, folder):
    assert cleared(tmp_path / folder) == []


def test_without_locks_nothing_is_taken_for_a_leftover(tmp_path, monkeypatch, pair):
    def refuse(fd, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FileSink(str(tmp_path / "out.pt"), force=False) as sink:
        assert cleared(tmp_path) == []
        sink.commit()
    pair[0].touch()
    assert cleared(tmp_path) == []
    assert names(tmp_path) == sorted([pair[0].name, "out.pt"])


@pytest.mark.parametrize("claim", [claimed_file, claimed_folder])
def test_what_is_cleared_before_it_is_claimed_is_made_again(tmp_path, monkeypatch, claim, pair):
    real, said = fcntl.flock, []

    def late(fd, operation):
        monkeypatch.setattr(fcntl, "flock", real)
        said.extend(cleared(tmp_path))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    fd = claim(pair[0])
    assert len(said) == 1
    assert os.path.samestat(os.fstat(fd), pair[0].stat())
    os.close(fd)


def test_a_folder_that_is_cleared_before_it_is_opened_is_made_again(tmp_path, monkeypatch, pair):
    real, said = os.open, []

    def late(path, *rest):
        monkeypatch.setattr(os, "open", real)
        said.extend(cleared(tmp_path))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", late)
    os.close(claimed_folder(pair[0]))
    assert len(said) == 1
    assert pair[0].is_dir()


@pytest.mark.parametrize("claim", [claimed_file, claimed_folder])
def test_an_interrupted_claim_leaves_nothing(tmp_path, monkeypatch, claim, pair):
    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(leftovers, "_is_at", interrupt)
    with pytest.raises(KeyboardInterrupt):
        claim(pair[0])
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_opened_is_not_left(tmp_path, monkeypatch, pair):
    def refuse(*_args):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="Too many"):
        claimed_folder(pair[0])
    assert names(tmp_path) == []
