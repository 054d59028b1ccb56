"""Leftovers of killed processes are removed or restored, those of running ones are not touched."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import filelock
import pytest

from ckptmove.errors import OutputClaimed, WriteFailed
from ckptmove.io import leftovers
from ckptmove.io.directory_sink import DirectorySink
from ckptmove.io.leftovers import Claim, clear_leftovers, is_temporary, is_unfinished, temporary_names
from ckptmove.io.outputs import LeftoversRemoved
from ckptmove.io.sink import FileSink


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def cleared(folder):
    """Messages about the cleanup of a folder."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        clear_leftovers(folder)
    assert all(one.category is LeftoversRemoved for one in said)
    return [str(one.message) for one in said]


@pytest.fixture
def pair(tmp_path):
    """The names of one conversion that nobody is at any more."""
    return temporary_names(tmp_path / "out")


def filled(path, name="a.txt"):
    path.mkdir()
    (path / name).write_bytes(b"a")
    return path


def test_names_are_told_apart_from_all_others(tmp_path):
    first, second = temporary_names(tmp_path / "out"), temporary_names(tmp_path / "out")
    assert len({*first, *second}) == 6
    assert all(is_temporary(path.name) and path.parent == tmp_path for path in (*first, *second))
    for other in ("run.part", ".ckptmove-00000000.journal", ".ckptmove-1.part", f"{first[0].name}.pth"):
        assert not is_temporary(other)


def test_a_file_is_removed(tmp_path, pair):
    pair[0].touch()
    assert cleared(tmp_path) == [f"{pair[0]}: left by an interrupted conversion, and removed"]
    assert names(tmp_path) == []
    assert cleared(tmp_path) == []


def test_a_folder_is_removed(tmp_path, pair):
    filled(pair[0])
    assert len(cleared(tmp_path)) == 1
    assert names(tmp_path) == []


def test_what_was_moved_aside_is_kept_and_named(tmp_path, pair):
    """These names may come with the folder: no file appears because of them."""
    pair[0].mkdir()
    pair[1].mkdir()
    filled(pair[1] / "out")
    before = names(tmp_path)
    (said,) = cleared(tmp_path)
    assert said.startswith(f"{pair[1] / 'out'}: ")
    assert said.endswith(f": mv {pair[1] / 'out'} {tmp_path / 'out'}")
    assert names(tmp_path) == before
    (pair[1] / "out").rename(tmp_path / "out")
    assert len(cleared(tmp_path)) == 1
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
    assert said.startswith(f"{pair[1]}: already replaced ")
    assert names(tmp_path) == ["out", "out/a.txt"]


def test_nothing_is_lost_where_the_name_is_taken(tmp_path, pair):
    filled(pair[0])
    pair[1].mkdir()
    filled(pair[1] / "out", "old.txt")
    filled(tmp_path / "out")
    before = names(tmp_path)
    for _ in range(2):
        (said,) = cleared(tmp_path)
        assert said.startswith(f"{pair[1] / 'out'}: ")
        assert str(tmp_path / "out") in said
        assert names(tmp_path) == before


@pytest.fixture
def claim(tmp_path):
    """A claim that has been taken."""
    claim = Claim(tmp_path / "out")
    claim.take()
    return claim


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_what_a_live_process_has_claimed_stays(tmp_path, make, claim):
    make(claim.names.part)
    before = names(tmp_path)
    assert (cleared(tmp_path), names(tmp_path)) == ([], before)
    assert all(map(is_unfinished, before))
    claim.release()
    assert (len(cleared(tmp_path)), names(tmp_path)) == (1, [])


def test_of_a_process_that_was_killed_before_it_made_anything_the_lock_is_removed(tmp_path, pair):
    pair.lock.touch()
    assert (cleared(tmp_path), names(tmp_path)) == ([], [])


@pytest.mark.parametrize("closed_first", [False, True], ids=["posix", "windows"])
def test_a_released_claim_leaves_nothing(tmp_path, monkeypatch, claim, closed_first):
    real = Path.unlink

    def refuse_once(path):
        monkeypatch.setattr(Path, "unlink", real)
        raise PermissionError(13, "a file that is open")

    if closed_first:
        monkeypatch.setattr(Path, "unlink", refuse_once)
    claim.release()
    assert names(tmp_path) == []


WRITER = """
import sys
import threading
from ckptmove.io.sink import FileSink
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
    assert (said, seen, names(tmp_path)) == ([], [3, 2], ["out"])


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
    def refuse(fd, *, blocking):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(filelock, "lock_descriptor", refuse)
    with FileSink(str(tmp_path / "out.pt"), force=False) as sink:
        assert cleared(tmp_path) == []
        sink.commit()
    pair.part.touch()
    assert cleared(tmp_path) == []
    assert names(tmp_path) == sorted([pair.part.name, "out.pt"])


def test_a_lock_that_somebody_else_put_there_is_not_followed(tmp_path, pair):
    (tmp_path / "precious").write_bytes(b"kept")
    pair.part.touch()
    pair.lock.symlink_to("precious")
    assert cleared(tmp_path) == []
    assert names(tmp_path) == sorted([pair.part.name, pair.lock.name, "precious"])


@pytest.mark.parametrize("passed", [0, 1], ids=["gate", "names"])
def test_a_lock_that_is_cleared_before_it_is_taken_is_made_again(tmp_path, monkeypatch, passed):
    real, taken = filelock.lock_descriptor, []

    def late(fd, *, blocking):
        taken.append(fd)
        if len(taken) > passed:
            monkeypatch.setattr(filelock, "lock_descriptor", real)
            assert cleared(tmp_path) == []
        return real(fd, blocking=blocking)

    monkeypatch.setattr(filelock, "lock_descriptor", late)
    claim = Claim(tmp_path / "out")
    before = claim.names
    claim.take()
    assert (claim.names != before) == bool(passed)
    assert names(tmp_path) == [claim.names.lock.name]
    claim.release()


@pytest.mark.unmeasured
def test_of_two_claims_at_once_one_is_taken(tmp_path):
    def take(claim, barrier, won):
        barrier.wait()
        with suppress(OutputClaimed):
            claim.take()
            won.append(claim)

    for number in range(20):
        won, barrier = [], threading.Barrier(2)
        claims = [Claim(tmp_path / f"out{number}") for _ in range(2)]
        threads = [threading.Thread(target=take, args=(claim, barrier, won)) for claim in claims]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert names(tmp_path) == [won[0].names.lock.name]
        won[0].release()
    assert names(tmp_path) == []


def test_one_output_has_one_claim_at_a_time(tmp_path, claim, monkeypatch):
    before = names(tmp_path)
    with pytest.raises(OutputClaimed):
        Claim(tmp_path / "out").take()
    assert names(tmp_path) == before
    other = Claim(tmp_path / "another")
    other.take()
    other.release()
    with monkeypatch.context() as patch:  # no locks in the file system: nobody can be known to hold it
        patch.setattr(leftovers, "_lock", lambda *_args, **_options: no_locks())
        unknown = Claim(tmp_path / "out")
        unknown.take()
        unknown.release()
    claim.release()
    claim.names.lock.touch()  # of a process that was killed
    again = Claim(tmp_path / "out")
    again.take()
    claim.names.lock.unlink()
    again.release()
    assert names(tmp_path) == []


def no_locks():
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_an_interrupted_claim_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(leftovers, "_is_at", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Claim(tmp_path / "out").take()
    assert names(tmp_path) == []


@pytest.mark.parametrize("sink", [FileSink, lambda output, **options: DirectorySink(output, frozenset(), **options)])
def test_an_output_that_cannot_be_begun_leaves_no_lock(tmp_path, monkeypatch, sink):
    def refuse(path, *_args, **_options):
        if str(path).endswith(".part"):
            raise OSError(24, "Too many open files")
        return real(path, *_args, **_options)

    name = "mkdir" if sink is not FileSink else "open"
    real = getattr(os, name)
    monkeypatch.setattr(os, name, refuse)
    with pytest.raises(WriteFailed, match="Too many"), sink(str(tmp_path / "out"), force=False):
        pass
    assert names(tmp_path) == []
