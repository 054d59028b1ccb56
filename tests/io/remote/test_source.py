from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.errors import DamagedArchive
from ckptmove.io.contracts import Traffic
from ckptmove.io.remote import source as module
from ckptmove.io.remote.source import CHUNK, WINDOW, RemoteSource
from ckptmove.model import Span


class Held:
    """A remote file in memory, which logs its requests."""

    path = "s3://b/a"

    def __init__(self, data: bytes, head: int = 0) -> None:
        self.data, self.size, self.head, self.log, self.is_closed = data, len(data), data[:head], [], False

    def fetch(self, start, end, *, is_bulk=False):
        assert 0 <= start < end <= self.size
        self.log.append((start, end))
        return self.data[start:end]

    def require_unchanged(self):
        self.log.append("unchanged")

    def close(self):
        self.is_closed = True


def pattern(size):
    return (bytes(range(251)) * (size // 251 + 1))[:size]


SMALL = pattern(5_000)


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)).map(sorted), max_size=12),
    st.sampled_from([0, 40]),
)
def test_reads_are_those_of_the_file(spans, head) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"WINDOW": 40, "CHUNK": 400, "_MOST_AHEAD": 200, "_AROUND": 4, "_KEPT": 300}.items():
            patch.setattr(module, name, value)
        file = Held(SMALL, head)
        source = RemoteSource(file, Traffic())
        for at, (start, end) in enumerate(spans):
            if at % 2:
                blocks = list(source.blocks(Span(start, end), 16))
                assert all(len(block) == 16 for block in blocks[:-1])
                assert b"".join(blocks) == SMALL[start:end]
            else:
                assert source.read(start, end) == SMALL[start:end]
            assert sum(len(window.data) for window in source._windows) <= 300


def test_a_window_at_the_start_and_one_at_the_end() -> None:
    file = Held(pattern(4 * WINDOW))
    source = RemoteSource(file, Traffic())
    source.read(0, 10)
    source.read(file.size - 100, file.size)
    source.read(file.size - 90_000, file.size - 80_000)
    source.read(100, 200_000)
    assert file.log == [(0, WINDOW), (file.size - WINDOW, file.size)]


def test_nothing_is_requested_twice() -> None:
    file = Held(pattern(3 * WINDOW))
    source = RemoteSource(file, Traffic())
    source.read(file.size - 100, file.size)
    source.read(0, file.size)
    assert sorted(file.log) == [(0, 2 * WINDOW), (2 * WINDOW, file.size)]


def test_reads_in_a_row_ask_for_more_each_time() -> None:
    file = Held(pattern(16 * WINDOW), WINDOW)
    source = RemoteSource(file, Traffic())
    for start in range(0, 10 * WINDOW, 1000):
        source.read(start, start + 1000)
    assert [end - start for start, end in file.log] == [2 * WINDOW, 4 * WINDOW, 8 * WINDOW]


def test_a_far_read_asks_for_little() -> None:
    file = Held(pattern(8 * WINDOW), WINDOW)
    RemoteSource(file, Traffic()).read(4 * WINDOW, 4 * WINDOW + 8)
    ((start, end),) = file.log
    assert end - start < 10_000


def test_tensors_are_streamed_in_chunks() -> None:
    file = Held(bytes(2 * CHUNK + 5))
    source = RemoteSource(file, Traffic())
    assert sum(len(block) for block in source.blocks(Span(0, file.size), 1 << 20)) == file.size
    assert len(file.log) == 3
    assert sum(len(window.data) for window in source._windows) <= module._KEPT


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (0, 6)])
def test_spans_outside_are_refused(span) -> None:
    source = RemoteSource(Held(b"12345"), Traffic())
    with pytest.raises(DamagedArchive):
        source.read(*span)
    with pytest.raises(DamagedArchive):
        list(source.blocks(Span(*span), 16))


def test_the_rest_is_passed_on() -> None:
    file = Held(b"12345")
    source = RemoteSource(file, Traffic())
    source.require_unchanged()
    source.close()
    assert file.log == ["unchanged"]
    assert file.is_closed


def test_traffic_in_words() -> None:
    assert Traffic(requests=2, nbytes=1 << 19).described(10_100_000_000) == "read 512 KiB of 9.4 GiB in 2 requests"
    assert Traffic(requests=1, nbytes=100).described(100) == "read 100 B of 100 B in 1 request"
