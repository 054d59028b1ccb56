"""The sink of a directory: complete or absent, and never over something that it may not replace."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from ckptmove.errors import NotDurable, OutputExists, OutputHoldsMore, WriteFailed
from ckptmove.io.directory_sink import DirectorySink
from ckptmove.io.leftovers import clear_leftovers
from ckptmove.io.outputs import LeftoversRemoved

NAMES = frozenset({"a.txt", "sub/b.txt", "last"})


def fill(sink, data=b"new"):
    sink.folder("", 0o755)
    sink.folder("sub", 0o555)
    sink.link("last", "sub/b.txt")
    for path in ("a.txt", "sub/b.txt"):
        with sink.file(path, 0o640) as file:
            file.write(data)


def write(output, data=b"new", *, force=False):
    with DirectorySink(str(output), NAMES, force=force) as sink:
        fill(sink, data)
        sink.commit()
    return sink


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


WHOLE = ["out", "out/a.txt", "out/last", "out/sub", "out/sub/b.txt"]


@pytest.mark.parametrize("force", [False, True])
def test_a_new_directory_is_whole_and_alone(tmp_path, force):
    with DirectorySink(str(tmp_path / "out"), NAMES, force=force) as sink:
        fill(sink)
        assert "out" not in names(tmp_path)
        sink.commit()
    assert names(tmp_path) == WHOLE
    assert (tmp_path / "out" / "last").read_bytes() == b"new"
    assert sink.leftover is None


def test_modes_are_as_asked_and_the_owner_may_write_to_folders(tmp_path):
    write(tmp_path / "out")
    modes = {name: stat.S_IMODE((tmp_path / name).lstat().st_mode) for name in WHOLE if name != "out/last"}
    assert modes == {"out": 0o755, "out/a.txt": 0o640, "out/sub": 0o755, "out/sub/b.txt": 0o640}


def test_while_it_is_written_nobody_else_looks_in(tmp_path):
    with DirectorySink(str(tmp_path / "out"), NAMES, force=False) as sink:
        fill(sink)
        (hidden,) = [path for path in tmp_path.iterdir() if path.is_dir()]
        assert stat.S_IMODE(hidden.stat().st_mode) == 0o700


def test_without_commit_nothing_is_left(tmp_path):
    with DirectorySink(str(tmp_path / "out"), NAMES, force=False) as sink:
        fill(sink)
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path, error):
    def interrupted():
        with DirectorySink(str(tmp_path / "out"), NAMES, force=True) as sink:
            fill(sink)
            with sink.file("c.txt", 0o600) as file:
                file.write(b"c")
                raise error

    with pytest.raises(error):
        interrupted()
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["directory", "file", "dangling"])
def test_an_existing_output_is_refused(tmp_path, kind):
    output = tmp_path / "out"
    {"directory": output.mkdir, "file": output.touch, "dangling": lambda: output.symlink_to("nowhere")}[kind]()
    with pytest.raises(OutputExists):
        write(output)
    assert names(tmp_path) == ["out"]


def test_force_replaces_a_directory(tmp_path):
    write(tmp_path / "out", b"old")
    assert write(tmp_path / "out", force=True).leftover is None
    assert names(tmp_path) == WHOLE
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"new"


def test_force_replaces_a_link_and_not_its_target(tmp_path):
    write(tmp_path / "real", b"old")
    (tmp_path / "out").symlink_to("real")
    write(tmp_path / "out", force=True)
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "real" / "a.txt").read_bytes() == b"old"
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"new"


def test_force_does_not_replace_a_file(tmp_path):
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(WriteFailed, match="Not a directory"):
        write(tmp_path / "out", force=True)
    assert (tmp_path / "out").read_bytes() == b"old"


@pytest.mark.parametrize("extra", ["thesis.txt", "sub/thesis.txt", "other/thesis.txt", "linked"])
def test_force_loses_nothing_that_the_new_one_does_not_hold(tmp_path, extra):
    write(tmp_path / "out", b"old")
    (tmp_path / "out" / extra).parent.mkdir(exist_ok=True)
    if extra == "linked":
        (tmp_path / "out" / extra).symlink_to("sub")
    else:
        (tmp_path / "out" / extra).touch()
    before = names(tmp_path)
    with pytest.raises(OutputHoldsMore) as caught:
        write(tmp_path / "out", force=True)
    assert caught.value.name == extra
    assert names(tmp_path) == before


def test_what_gets_into_it_meanwhile_is_not_lost(tmp_path):
    write(tmp_path / "out", b"old")
    with DirectorySink(str(tmp_path / "out"), NAMES, force=True) as sink:
        fill(sink)
        (tmp_path / "out" / "thesis.txt").touch()
        with pytest.raises(OutputHoldsMore):
            sink.commit()
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"old"
    assert names(tmp_path) == sorted([*WHOLE, "out/thesis.txt"])


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_appears_at_the_last_instant_is_not_lost(tmp_path, monkeypatch, kind):
    output = tmp_path / "out"
    real = DirectorySink._check_output

    def look(self):
        found = real(self)
        if self._folders:  # the second time
            if kind == "file":
                output.write_bytes(b"theirs")
            else:
                output.mkdir()
                (output / "theirs").touch()
        return found

    monkeypatch.setattr(DirectorySink, "_check_output", look)
    with pytest.raises(OutputExists):
        write(output)
    assert names(tmp_path) == (["out"] if kind == "file" else ["out", "out/theirs"])


def failing_rename(monkeypatch):
    """Taking the name fails, moving something aside does not."""
    real = Path.rename

    def rename(self, target):
        if self.name.endswith(".part"):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)


def test_a_failed_rename_leaves_nothing(tmp_path, monkeypatch):
    failing_rename(monkeypatch)
    with pytest.raises(WriteFailed, match="Input/output error"):
        write(tmp_path / "out")
    assert names(tmp_path) == []


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    write(tmp_path / "out", b"old")
    failing_rename(monkeypatch)
    with pytest.raises(WriteFailed, match="Input/output error"):
        write(tmp_path / "out", force=True)
    assert names(tmp_path) == WHOLE
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"old"


def test_one_that_cannot_be_moved_aside_stays(tmp_path, monkeypatch):
    write(tmp_path / "out", b"old")
    real = Path.rename

    def rename(self, target):
        if self.name == "out":
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(WriteFailed, match="Input/output error"):
        write(tmp_path / "out", force=True)
    assert names(tmp_path) == WHOLE
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"old"


def test_the_old_one_is_kept_where_another_takes_the_name(tmp_path, monkeypatch):
    write(tmp_path / "out", b"old")
    real = Path.rename

    def rename(self, target):
        real(self, target)
        if self.name == "out":
            write(tmp_path / "theirs", b"theirs")
            real(tmp_path / "theirs", tmp_path / "out")

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputExists):
        write(tmp_path / "out", force=True)
    monkeypatch.undo()
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"theirs"
    with pytest.warns(LeftoversRemoved, match="it is kept$") as said:
        clear_leftovers(tmp_path)
    (old,) = tmp_path.glob(".ckptmove-*.old/out")
    assert str(said[0].message).startswith(f"{old}: ")
    assert (old / "a.txt").read_bytes() == b"old"


def test_a_name_that_is_not_durable_is_told(tmp_path, monkeypatch):
    real = os.fsync

    def fail(fd):
        if os.path.samestat(os.fstat(fd), tmp_path.stat()):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    write(tmp_path / "out", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NotDurable):
        write(tmp_path / "out", force=True)
    assert names(tmp_path) == WHOLE
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"new"


def test_at_every_instant_there_is_a_whole_one(tmp_path, monkeypatch):
    write(tmp_path / "out", b"old")
    seen = []
    real = Path.rename

    def rename(self, target):
        real(self, target)
        seen.append(
            sorted(path.read_bytes() for path in tmp_path.rglob("a.txt") if (path.parent / "sub/b.txt").exists())
        )

    monkeypatch.setattr(Path, "rename", rename)
    write(tmp_path / "out", force=True)
    assert seen == [[b"new", b"old"], [b"new", b"old"]]


def test_an_old_one_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    write(tmp_path / "out", b"old")
    real = shutil.rmtree

    def refuse(path, **options):
        if str(path).endswith(".old"):
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    sink = write(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"new"
    assert sink.leftover is not None
    assert sink.leftover.endswith(".old")


def test_an_interrupted_removal_is_finished(tmp_path, monkeypatch):
    write(tmp_path / "out", b"old")
    real = shutil.rmtree
    calls = []

    def interrupt(path, **options):
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", force=True)
    assert names(tmp_path) == WHOLE
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"new"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk(tmp_path, monkeypatch, code):
    def fail(fd, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(WriteFailed) as caught:
        write(tmp_path / "out")
    assert caught.value.reason == os.strerror(code)
    assert caught.value.path == str(tmp_path / "out" / "a.txt")
    assert names(tmp_path) == []


@pytest.mark.parametrize(("what", "name"), [("mkdir", "sub"), ("symlink_to", "last")])
def test_no_room_for_a_folder_or_a_link(tmp_path, monkeypatch, what, name):
    real = getattr(Path, what)

    def fail(self, *rest, **options):
        if self.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, *rest, **options)

    monkeypatch.setattr(Path, what, fail)
    with pytest.raises(WriteFailed) as caught:
        write(tmp_path / "out")
    assert (caught.value.path, caught.value.reason) == (str(tmp_path / "out" / name), os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []


def test_a_failed_sync_is_a_failure(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, "Input/output error")

    with DirectorySink(str(tmp_path / "out"), NAMES, force=False) as sink:
        fill(sink)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(WriteFailed, match="Input/output error"):
            sink.commit()
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["gone/out", "a\0b"])
def test_a_place_that_no_directory_can_have(tmp_path, name):
    with pytest.raises(WriteFailed):
        write(tmp_path / name)
    assert names(tmp_path) == []
