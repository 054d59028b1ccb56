"""Writing a new file: space is reserved first, then bytes are written or copied by the kernel."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil

import pytest

from ckptmove.errors import WriteFailed
from ckptmove.io.new_file import NewFile

DATA = bytes(range(256)) * 40


@pytest.fixture
def new(tmp_path):
    fd = os.open(tmp_path / "new.pt", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    file = NewFile("out.pt", tmp_path / "new.pt", fd)
    yield file
    file.close()


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source.pt").write_bytes(DATA)
    with (tmp_path / "source.pt").open("rb") as file:
        yield file.fileno()


def disk(total, free):
    """Figures of a disk, in bytes."""
    return lambda folder: (total, total - free, free)


def test_a_disk_that_is_too_small_says_so_with_figures(new, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", disk(4_096_000, 8192))
    with pytest.raises(WriteFailed) as caught:
        new.reserve(3_000_000)
    assert str(caught.value) == (
        f"out.pt: could not write: {caught.value.reason}: 3,000,000 bytes are needed, and 8,192 are free"
    )
    assert caught.value.reason == os.strerror(errno.ENOSPC)
    assert (tmp_path / "new.pt").stat().st_size == 0
    new.reserve(8192)


@pytest.mark.parametrize("kind", ["without bounds", "silent", "absent"])
def test_a_disk_that_does_not_say_what_is_free_is_believed(new, tmp_path, monkeypatch, kind):
    def silent(folder):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(shutil, "disk_usage", silent if kind == "silent" else disk(0, 0))
    if kind == "absent":
        monkeypatch.delattr(shutil, "disk_usage")
    new.reserve(len(DATA))
    new.write(DATA)
    new.make_durable(None)
    assert (tmp_path / "new.pt").read_bytes() == DATA


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_what_cannot_be_reserved_fails_before_the_work(new, monkeypatch, code):
    def allocate(fd, start, nbytes):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(WriteFailed) as caught:
        new.reserve(1)
    assert (caught.value.path, caught.value.reason) == ("out.pt", os.strerror(code))


@pytest.mark.parametrize("kind", ["refused", "absent"])
def test_a_file_system_that_cannot_reserve_is_written_to_all_the_same(new, tmp_path, monkeypatch, kind):
    def allocate(fd, start, nbytes):
        raise OSError(errno.EBADF, "Bad file descriptor")  # the errno of glibc if it cannot emulate the call

    if kind == "refused":
        monkeypatch.setattr(os, "posix_fallocate", allocate)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
    new.reserve(len(DATA))
    new.write(DATA)
    assert (tmp_path / "new.pt").read_bytes() == DATA


def test_glibc_is_kept_from_imitating_a_reservation(new, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, *_: seen.append(fcntl.fcntl(fd, fcntl.F_GETFL)))
    new.reserve(1)
    assert [bool(flags & os.O_APPEND) for flags in seen] == [True]
    assert not fcntl.fcntl(new._fd, fcntl.F_GETFL) & os.O_APPEND


def test_what_was_reserved_and_not_used_goes_back(new, tmp_path):
    new.reserve(100_000)
    new.write(DATA)
    new.make_durable(0o640)
    assert (tmp_path / "new.pt").read_bytes() == DATA
    assert (tmp_path / "new.pt").stat().st_mode & 0o777 == 0o640


def test_the_kernel_appends_what_lies_in_another_file(new, source, tmp_path):
    new.reserve(1003)
    new.write(b"abc")
    assert new.copy(source, 256, 1000) == 1000
    new.write(b"z")
    assert (tmp_path / "new.pt").read_bytes() == b"abc" + DATA[256:1256] + b"z"


def test_the_kernel_says_where_a_file_ends(new, source):
    assert new.copy(source, len(DATA) - 10, 1000) == 10
    assert new.copy(source, len(DATA), 1000) == 0


@pytest.mark.parametrize("kind", ["refused", "absent"])
def test_a_kernel_that_cannot_copy_has_appended_nothing(new, source, tmp_path, monkeypatch, kind):
    def copy(*args):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if kind == "refused":
        monkeypatch.setattr(os, "copy_file_range", copy)
    else:
        monkeypatch.delattr(os, "copy_file_range")
    assert new.copy(source, 0, 10) == 0
    new.write(b"abc")
    assert (tmp_path / "new.pt").read_bytes() == b"abc"


def test_ranges_are_written_in_any_order(new, source, tmp_path):
    late, early = new.at(6 << 20), new.at(0)
    late.write(DATA)
    late.write(b"")
    early.write(bytes(6 << 20))  # more than the system is advised to write at once
    after = new.at((6 << 20) + len(DATA))
    copied = after.copy(source, 10, 20)
    after.write(DATA[10 + copied : 30])
    new.skip((6 << 20) + len(DATA) + 20)
    new.make_durable(None)
    assert (tmp_path / "new.pt").read_bytes() == bytes(6 << 20) + DATA + DATA[10:30]


def test_a_range_that_the_system_does_not_write(tmp_path):
    (tmp_path / "new.pt").touch()
    fd = os.open(tmp_path / "new.pt", os.O_RDONLY)
    with pytest.raises(WriteFailed):
        NewFile("out.pt", tmp_path / "new.pt", fd).at(3).write(b"1")
    os.close(fd)


def test_a_file_that_cannot_be_gone_through_is_a_failed_write(new):
    new.close()
    with pytest.raises(WriteFailed) as caught:
        new.skip(1)
    assert (caught.value.path, caught.value.reason) == ("out.pt", os.strerror(errno.EBADF))
