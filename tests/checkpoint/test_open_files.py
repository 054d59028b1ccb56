"""Files of a directory that are opened when they are read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ckptmove.checkpoint.open_files import OpenFiles
from ckptmove.model import Span

DATA = bytes(range(250)) * 4


class Source:
    """Bytes that count their reads."""

    def __init__(self, path, *, is_remote):
        self.path, self.size, self.is_remote, self.is_open = path, len(DATA), is_remote, True
        self.reads = []

    def read(self, start, end):
        self.reads.append((start, end))
        return DATA[start:end]

    def close(self):
        self.is_open = False


@pytest.mark.parametrize(
    ("is_remote", "reads"),
    [(False, [(5, 105), (105, 205), (205, 255)]), (True, [(5, 255)])],
)
def test_a_block_is_a_read_of_a_file_and_eight_are_a_request_to_a_server(is_remote, reads):
    source = Source("a", is_remote=is_remote)
    files = OpenFiles(SimpleNamespace(files=(), open=lambda _: source))
    blocks = [bytes(block) for block in files.source("a").blocks(Span(5, 255), 100)]
    assert blocks == [DATA[5:105], DATA[105:205], DATA[205:255]]
    assert source.reads == reads
    source.reads.clear()
    assert sum(len(block) for block in files.source("a").blocks(Span(0, 1000), 100)) == 1000
    assert len(source.reads) == (2 if is_remote else 10)
    files.close()
    assert not source.is_open


def test_thirty_two_files_are_open_at_a_time():
    opened = []

    def open_it(path):
        opened.append(Source(path, is_remote=False))
        return opened[-1]

    files = OpenFiles(SimpleNamespace(files=(), open=open_it))
    for number in range(40):
        assert files.source(str(number)).read(0, 9) == DATA[:9]
    assert [source.path for source in opened if source.is_open] == [str(number) for number in range(8, 40)]
    files.close()
    assert not any(source.is_open for source in opened)
