"""A local copy of a remote file with holes."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmove.api.failures import failure_of
from ckptmove.io.contracts import Traffic
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import CopyFailed
from ckptmove.io.remote.filesystem import open_remote
from ckptmove.io.remote.partial_copy import PartialCopy, joined, partial_copy
from ckptmove.io.remote.source import CHUNK, RemoteSource
from ckptmove.limits import Limits
from ckptmove.model import Span

URL = "s3://bucket/a.pth"
DATA = bytes(range(1, 251)) * 100
spans = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 50)).map(lambda one: Span(one[0], one[0] + one[1])))


class File:
    path, head = "there", DATA[:100]

    def __init__(self):
        self.size, self.asked, self.version = len(DATA), [], (len(DATA),)

    def fetch(self, start, end, *, is_bulk=False):
        self.asked.append(Span(start, end))
        return DATA[start:end]

    def require_unchanged(self):
        self.asked.append("unchanged")

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def copy(tmp_path):
    return PartialCopy(str(tmp_path / "run.pth"), URL)


def test_what_is_read_is_kept_and_the_rest_is_zeros(copy) -> None:
    file = File()
    source = RemoteSource(copy.keep(file), Traffic())
    source.fetch(5000, 6000)
    source.require_unchanged()
    source.close()
    assert file.asked == [Span(5000, 6000), "unchanged", "closed"]
    assert Path(copy.path).read_bytes() == DATA[:100] + bytes(4900) + DATA[5000:6000] + bytes(len(DATA) - 6000)


def covered(some):
    return {at for span in some for at in range(span.start, span.end)}


@given(some=spans)
def test_joined_spans_are_apart_and_in_order(some) -> None:
    found = joined(some)
    assert covered(found) == covered(some)
    assert all(one.end < other.start for one, other in pairwise(found))


@given(kept=spans, wanted=spans)
def test_only_what_is_missing_is_requested(tmp_path_factory, kept, wanted) -> None:
    copy = PartialCopy(str(tmp_path_factory.getbasetemp() / "missing"), URL)
    copy.keep(type("Empty", (File,), {"head": b""})())
    for span in kept:
        copy.add("", span.start, DATA[span.start : span.end])
    found = copy.missing("", wanted)
    left = covered(wanted) - covered(kept)
    assert left <= covered(found)
    assert len(found) == bool(left)  # a gap between two of them costs less than a request


def test_large_spans_are_requested_in_chunks(copy) -> None:
    copy.keep(File())
    assert copy.missing("", [Span(200, 200 + 2 * CHUNK), Span(3 * CHUNK, 3 * CHUNK + 1)]) == [
        Span(200, 200 + CHUNK), Span(200 + CHUNK, 200 + 2 * CHUNK), Span(3 * CHUNK, 3 * CHUNK + 1)
    ]  # fmt: skip


def test_bytes_that_were_read_stay(copy) -> None:
    copy.keep(File())
    copy.add("", 200, DATA[200:300])
    pieces = [(0, b"x" * 10), (95, b"x" * 10), (150, b"x" * 10), (195, b"x" * 10), (290, b"x" * 20), (400, b"x" * 3)]
    left = copy.stand_in("", pieces)
    assert left == [Span(95, 105), Span(195, 205), Span(290, 310)]
    data = Path(copy.path).read_bytes()
    assert data[:150] == DATA[:100] + bytes(50)
    assert data[150:160] == b"x" * 10
    assert data[200:300] == DATA[200:300]
    assert data[400:403] == b"x" * 3


def test_a_directory_has_all_its_files(tmp_path, server) -> None:
    for name, nbytes in (("a/b.bin", 10), ("c.txt", 20)):
        (server.root / "many" / name).parent.mkdir(parents=True, exist_ok=True)
        (server.root / "many" / name).write_bytes(DATA[:nbytes])
    copy = PartialCopy(str(tmp_path / "many"), URL)
    listing = open_remote(Address(f"{server.url}/many/"), Limits(), copy)
    listing.open("a/b.bin").close()
    copy.complete(listing)
    assert (tmp_path / "many" / "a" / "b.bin").read_bytes() == DATA[:10]
    assert (tmp_path / "many" / "c.txt").read_bytes() == bytes(20)


def test_a_system_that_refuses(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    errors = []
    with pytest.raises(CopyFailed) as raised:
        PartialCopy(str(tmp_path / "file" / "below"), URL).keep(File())
    errors.append(raised.value)
    copy = PartialCopy(str(tmp_path / "gone"), URL)
    copy.keep(File())
    Path(copy.path).unlink()
    with pytest.raises(CopyFailed) as raised:
        copy.add("", 0, b"x")
    errors.append(raised.value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(CopyFailed) as raised, partial_copy(Address(f"{URL}?token=hunter2")):
        pass
    errors.append(raised.value)
    assert [error.path for error in errors] == [URL, URL, f"{URL}?token=***"]
    failures = list(map(failure_of, errors))
    assert {failure.exit_code for failure in failures} == {5}
    assert all("--download" in failure.hint and "--output" not in failure.hint for failure in failures)


def test_it_is_removed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with partial_copy(Address("s3://bucket/a.pth")) as copy:
        copy.keep(File())
        assert Path(copy.path).name == "a.pth"
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
