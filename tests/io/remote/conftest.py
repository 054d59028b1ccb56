"""Servers on localhost: one of files for HTTP, and moto for S3."""

from __future__ import annotations

import pytest
from http_server import serving
from moto_server import moto, sent  # noqa: F401  # fixtures

from ckptmove.io.remote import http


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def server(started, monkeypatch):
    """A web server without faults, and a client that does not pause."""
    monkeypatch.setattr(http, "PAUSES", [0.0, 0.0])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    started.clear()
    return started
