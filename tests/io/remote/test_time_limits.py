from __future__ import annotations

import threading
from time import monotonic

import fsspec
import pytest

from ckptmove.errors import SourceChanged
from ckptmove.io.remote import time_limits
from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import RemoteFailed
from ckptmove.io.remote.filesystem import expand, find_place, identify, open_remote
from ckptmove.io.remote.time_limits import MOST_TIMED, range_seconds, timed
from ckptmove.limits import Limits

ADDRESS = Address("memory://a.pth")


@pytest.fixture
def gate(monkeypatch):
    """Opens what waits for it, at the end of the test."""
    monkeypatch.setattr(time_limits, "SECONDS", 0.3)
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.mark.parametrize("seconds", [None, 0.4])
def test_a_call_that_takes_too_long_is_left_alone(gate, seconds) -> None:
    before = monotonic()
    with pytest.raises(RemoteFailed, match="the server did not answer in time"):
        timed(ADDRESS, gate.wait, seconds)
    assert 0.3 <= monotonic() - before < 1.5


@pytest.mark.parametrize(
    ("nbytes", "is_bulk", "seconds"),
    [(10, False, 60), (MOST_TIMED, False, 60), (10, True, 60), (MOST_TIMED, True, 480), (16 << 20, False, 960)],
)
def test_many_bytes_may_take_longer(nbytes, is_bulk, seconds) -> None:
    assert range_seconds(nbytes, is_bulk=is_bulk) == seconds


def test_the_result_and_the_error_are_those_of_the_call() -> None:
    assert timed(ADDRESS, lambda: 3) == 3
    with pytest.raises(SourceChanged):
        timed(ADDRESS, lambda: (_ for _ in ()).throw(SourceChanged("x")).__next__())


@pytest.fixture
def place():
    fs = fsspec.filesystem("memory")
    fs.pipe("/a.pth", b"x" * 100)
    yield find_place(ADDRESS)
    fs.rm("/a.pth")


def test_a_file_system_that_does_not_answer(gate, place, monkeypatch) -> None:
    source = open_remote(ADDRESS, Limits())
    looks = [
        lambda: source.read(0, 100), source.require_unchanged, lambda: identify(ADDRESS),
        lambda: open_remote(ADDRESS, Limits()),
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(type(source._file._file), "read", lambda *_: gate.wait())
        patch.setattr(type(place.fs), "info", lambda *_, **__: gate.wait())
        for look in looks:
            with pytest.raises(RemoteFailed, match="in time"):
                look()


def test_a_listing_that_does_not_end(gate, place, monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.io.remote.filesystem.LISTING_SECONDS", 0.3)
    with monkeypatch.context() as patch:
        for name in ("find", "glob"):
            patch.setattr(type(place.fs), name, lambda *_, **__: gate.wait())
        for look in (lambda: open_remote(Address("memory://runs/"), Limits()), lambda: expand(Address("memory://*"))):
            with pytest.raises(RemoteFailed, match="in time"):
                look()


def test_an_index_page_that_does_not_end(server, gate, monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.io.remote.filesystem.SECONDS", 0.3)
    fsspec.filesystem("http").clear_instance_cache()
    server.faults.append(lambda _: gate.wait())
    with pytest.raises(RemoteFailed, match="in time"):
        open_remote(Address(f"{server.url}/runs/"), Limits())
    fsspec.filesystem("http").clear_instance_cache()
