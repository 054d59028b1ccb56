"""Local files as sources: opening, reading, and changes of the file meanwhile."""

from __future__ import annotations

import errno
import os
import socket
import stat

import pytest

from ckptmove.errors import AccessFailed, DamagedArchive, MissingFile, NotACheckpoint, SourceChanged
from ckptmove.io.source import open_source
from ckptmove.model import Span

DATA = bytes(range(256)) * 40


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "weights.pt"
    path.write_bytes(DATA)
    opened = open_source(str(path))
    yield opened
    opened.close()


def test_it_knows_its_path_and_size(source, tmp_path):
    assert source.path == str(tmp_path / "weights.pt")
    assert source.size == len(DATA)


@pytest.mark.parametrize(("start", "end"), [(0, 0), (0, 1), (5, 300), (0, len(DATA)), (len(DATA), len(DATA))])
def test_read_gives_the_bytes_of_the_span(source, start, end):
    assert source.read(start, end) == DATA[start:end]


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3), (0, len(DATA) + 1), (len(DATA) + 1, len(DATA) + 1)])
def test_a_span_outside_the_file_is_refused(source, start, end):
    with pytest.raises(DamagedArchive):
        source.read(start, end)
    with pytest.raises(DamagedArchive):
        next(source.blocks(Span(start, end), 16), None)


@pytest.mark.parametrize("block_bytes", [1, 7, 100, 1 << 20])
def test_blocks_cover_the_span_in_order(source, block_bytes):
    blocks = [bytes(block) for block in source.blocks(Span(10, 310), block_bytes)]
    assert b"".join(blocks) == DATA[10:310]
    assert all(len(block) == block_bytes for block in blocks[:-1])


def test_blocks_stay_valid_as_long_as_was_asked_for(source):
    blocks = source.blocks(Span(0, 400), 100, 3)
    first, second, third = next(blocks), next(blocks), next(blocks)
    assert bytes(first) + bytes(second) + bytes(third) == DATA[:300]
    next(blocks)
    assert bytes(second) + bytes(third) == DATA[100:300]


def test_blocks_of_an_empty_span(source):
    assert list(source.blocks(Span(3, 3), 16)) == []


def test_a_file_that_shrinks_is_noticed(source):
    os.truncate(source.path, 100)
    with pytest.raises(SourceChanged):
        source.read(0, len(DATA))
    with pytest.raises(SourceChanged):
        list(source.blocks(Span(0, len(DATA)), 64))


def test_a_failing_disk_is_told(source, monkeypatch):
    class Failing:
        def seek(self, start):
            raise OSError(errno.EIO, "Input/output error")

        def fileno(self):
            raise OSError(errno.EIO, "Input/output error")

        def close(self):
            pass

    source.close()
    monkeypatch.setattr(source, "_file", Failing())
    with pytest.raises(AccessFailed, match="Input/output error"):
        source.read(0, 1)
    with pytest.raises(AccessFailed, match="Input/output error"):
        list(source.blocks(Span(0, 1), 1))


def test_nothing_there(tmp_path):
    with pytest.raises(MissingFile):
        open_source(str(tmp_path / "gone.pt"))


def test_what_is_no_file_is_named_and_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotACheckpoint, match="a named pipe"):
        open_source(str(tmp_path / "pipe"))
    with pytest.raises(NotACheckpoint, match="a directory"):
        open_source(str(tmp_path))
    with pytest.raises(NotACheckpoint, match="a character device"):
        open_source(os.devnull)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        with pytest.raises(NotACheckpoint, match="a socket"):
            open_source(str(tmp_path / "s"))


def test_permission_denied(tmp_path, monkeypatch):
    path = tmp_path / "secret.pt"
    path.write_bytes(b"x")
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything: let the system call say no
        real = os.stat

        def refuse(name, *args, **kwargs):
            if name == str(path):
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(name, *args, **kwargs)

        monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(AccessFailed, match="Permission denied"):
        open_source(str(path))


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_a_path_that_no_file_can_have(path):
    with pytest.raises(AccessFailed):
        open_source(path)


def test_a_file_through_a_link(tmp_path):
    (tmp_path / "real.pt").write_bytes(b"abc")
    (tmp_path / "link.pt").symlink_to("real.pt")
    source = open_source(str(tmp_path / "link.pt"))
    assert source.read(0, 3) == b"abc"
    assert stat.S_ISLNK((tmp_path / "link.pt").lstat().st_mode)
    source.close()


def test_blocks_are_the_same_where_the_system_cannot_read_at_an_offset(source, monkeypatch):
    span = Span(0, source.size)
    whole = b"".join(map(bytes, source.blocks(span, 3)))
    for name in ("pread", "preadv"):
        monkeypatch.delattr(os, name, raising=False)
    assert b"".join(map(bytes, source.blocks(span, 3))) == whole == source.read(*span)
