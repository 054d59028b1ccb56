"""The sink: a complete file or none, and never over something that it may not replace."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys

import pytest

from ckptmove.errors import NotDurable, OutputExists, WriteFailed
from ckptmove.io.leftovers import clear_leftovers
from ckptmove.io.locations import same_file
from ckptmove.io.outputs import LeftoversRemoved
from ckptmove.io.sink import FileSink


def write(output, data=b"new", *, force=False):
    with FileSink(str(output), force=force) as sink:
        sink.write(data)
        sink.commit()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("force", [False, True])
def test_a_new_file_is_whole_and_alone(tmp_path, force):
    with FileSink(str(tmp_path / "out.pt"), force=force) as sink:
        sink.write(b"one")
        sink.write(memoryview(b"-two"))
        assert "out.pt" not in names(tmp_path)
        sink.commit()
    assert (tmp_path / "out.pt").read_bytes() == b"one-two"
    assert names(tmp_path) == ["out.pt"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_its_mode_is_what_open_would_give(tmp_path, mask):
    old = os.umask(mask)
    try:
        write(tmp_path / "out.pt")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "out.pt").stat().st_mode) == 0o666 & ~mask


def test_without_commit_nothing_is_left(tmp_path):
    with FileSink(str(tmp_path / "out.pt"), force=False) as sink:
        sink.write(b"one")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path, error):
    def interrupted():
        with FileSink(str(tmp_path / "out.pt"), force=True) as sink:
            sink.write(b"one")
            raise error

    with pytest.raises(error):
        interrupted()
    assert names(tmp_path) == []


def test_an_existing_output_is_refused(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"old")
    with pytest.raises(OutputExists):
        write(tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == b"old"
    assert names(tmp_path) == ["out.pt"]


def test_a_dangling_link_is_an_output_too(tmp_path):
    (tmp_path / "out.pt").symlink_to("nowhere")
    with pytest.raises(OutputExists):
        write(tmp_path / "out.pt")


def test_force_replaces_a_file(tmp_path):
    (tmp_path / "out.pt").write_bytes(b"old")
    write(tmp_path / "out.pt", force=True)
    assert (tmp_path / "out.pt").read_bytes() == b"new"


def test_force_replaces_a_link_and_not_its_target(tmp_path):
    (tmp_path / "real.pt").write_bytes(b"old")
    (tmp_path / "out.pt").symlink_to("real.pt")
    write(tmp_path / "out.pt", force=True)
    assert (tmp_path / "real.pt").read_bytes() == b"old"
    assert (tmp_path / "out.pt").read_bytes() == b"new"


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_in_the_way(tmp_path, force):
    (tmp_path / "out.pt").mkdir()
    with pytest.raises(WriteFailed, match="Is a directory"):
        write(tmp_path / "out.pt", force=force)


def test_force_does_not_replace_a_device(tmp_path):
    os.mkfifo(tmp_path / "out.pt")
    with pytest.raises(WriteFailed, match="neither a regular file"):
        write(tmp_path / "out.pt", force=True)
    assert names(tmp_path) == ["out.pt"]


def test_a_missing_folder(tmp_path):
    with pytest.raises(WriteFailed) as caught:
        write(tmp_path / "gone" / "out.pt")
    assert caught.value.reason == os.strerror(errno.ENOENT)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_name_that_no_file_can_have(tmp_path, name):
    with pytest.raises(WriteFailed):
        write(tmp_path / name)
    assert names(tmp_path) == []


def test_what_appears_meanwhile_is_not_lost(tmp_path):
    with FileSink(str(tmp_path / "out.pt"), force=False) as sink:
        sink.write(b"new")
        (tmp_path / "out.pt").write_bytes(b"theirs")
        with pytest.raises(OutputExists):
            sink.commit()
    assert (tmp_path / "out.pt").read_bytes() == b"theirs"
    assert names(tmp_path) == ["out.pt"]


def refuse_link(monkeypatch, code, before=None):
    def link(source, target):
        if before is not None:
            before()
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)


def test_what_appears_at_the_last_instant_is_not_lost(tmp_path, monkeypatch):
    refuse_link(monkeypatch, errno.EEXIST, lambda: (tmp_path / "out.pt").write_bytes(b"theirs"))
    with pytest.raises(OutputExists):
        write(tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == b"theirs"


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    refuse_link(monkeypatch, errno.EPERM)
    write(tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == b"new"
    assert names(tmp_path) == ["out.pt"]


def test_without_hard_links_what_appears_meanwhile_is_not_lost(tmp_path, monkeypatch):
    refuse_link(monkeypatch, errno.EOPNOTSUPP, lambda: (tmp_path / "out.pt").write_bytes(b"theirs"))
    with pytest.raises(OutputExists):
        write(tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == b"theirs"
    assert names(tmp_path) == ["out.pt"]


def test_without_hard_links_a_failed_rename_leaves_nothing(tmp_path, monkeypatch):
    refuse_link(monkeypatch, errno.EPERM)

    def replace(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(type(tmp_path), "replace", replace)
    with pytest.raises(WriteFailed, match="Input/output error"):
        write(tmp_path / "out.pt")
    assert names(tmp_path) == []


def test_another_name_that_cannot_be_removed_is_left_to_the_next_run(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patches:
        patches.setattr(os, "unlink", refuse)
        patches.setattr(type(tmp_path), "unlink", refuse)
        write(tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_bytes() == b"new"
    with pytest.warns(LeftoversRemoved):
        clear_leftovers(tmp_path)
    assert names(tmp_path) == ["out.pt"]


def test_another_failure_of_link_is_told(tmp_path, monkeypatch):
    refuse_link(monkeypatch, errno.EDQUOT)
    with pytest.raises(WriteFailed, match="quota"):
        write(tmp_path / "out.pt")
    assert names(tmp_path) == []


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    write(tmp_path / "out.pt", b"0123456789")
    assert (tmp_path / "out.pt").read_bytes() == b"0123456789"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk(tmp_path, monkeypatch, code):
    def fail(fd, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(WriteFailed) as caught:
        write(tmp_path / "out.pt")
    assert caught.value.reason == os.strerror(code)
    assert caught.value.path == str(tmp_path / "out.pt")
    assert names(tmp_path) == []


def test_a_limit_of_the_system_itself(tmp_path):
    script = (
        "import sys\nfrom ckptmove.io.sink import FileSink\nfrom ckptmove.errors import WriteFailed\n"
        "try:\n    with FileSink(sys.argv[1], force=False) as sink:\n        sink.write(bytes(9000))\n"
        "except WriteFailed as error:\n    print(error.reason)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out.pt")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: (
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
        ),
    )
    assert done.stdout.strip() == os.strerror(errno.EFBIG)
    assert names(tmp_path) == []


@pytest.mark.parametrize("when", ["file", "folder"])
def test_a_failed_sync_is_a_failure(tmp_path, monkeypatch, when):
    real = os.fsync

    def fail(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode) == (when == "folder"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NotDurable if when == "folder" else WriteFailed, match="Input/output error"):
        write(tmp_path / "out.pt")
    # Once it has its name, it is whole.
    assert names(tmp_path) == (["out.pt"] if when == "folder" else [])


def test_a_folder_that_has_nothing_to_sync(tmp_path, monkeypatch):
    real = os.fsync

    def refuse_folders(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(fd)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write(tmp_path / "out.pt")
    assert names(tmp_path) == ["out.pt"]


@pytest.mark.parametrize("advice", ["there", "absent"])
def test_much_is_written_with_or_without_early_writeback(tmp_path, monkeypatch, advice):
    if advice == "absent":
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    data = os.urandom(1 << 20)
    with FileSink(str(tmp_path / "out.pt"), force=False) as sink:
        for _ in range(9):
            sink.write(data)
        sink.commit()
    assert (tmp_path / "out.pt").read_bytes() == data * 9


def test_the_same_file(tmp_path):
    source = tmp_path / "a.pt"
    source.write_bytes(b"x")
    (tmp_path / "link.pt").symlink_to("a.pt")
    (tmp_path / "hard.pt").hardlink_to(source)
    (tmp_path / "other.pt").write_bytes(b"x")
    for output in ("a.pt", "link.pt", "hard.pt", "../" + tmp_path.name + "/a.pt"):
        assert same_file(str(source), str(tmp_path / output))
    for output in ("other.pt", "gone.pt", "a\0b"):
        assert not same_file(str(source), str(tmp_path / output))


def test_a_folder_that_cannot_be_opened_fails_before_the_name_is_taken(tmp_path, monkeypatch):
    real = os.open

    def refuse_folders(path, flags, *rest, **options):
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse_folders)
    with pytest.raises(WriteFailed, match="Permission denied"):
        write(tmp_path / "out.pt")
    monkeypatch.undo()
    assert names(tmp_path) == []


def test_no_byte_is_ever_in_a_file_that_more_people_can_read(tmp_path):
    with FileSink(str(tmp_path / "out.pt"), force=False, mode=0o600) as sink:
        (temporary,) = [path for path in tmp_path.iterdir() if path.suffix == ".part"]
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        sink.write(b"x")
        sink.commit()
    assert stat.S_IMODE((tmp_path / "out.pt").stat().st_mode) == 0o600
