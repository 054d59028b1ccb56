"""Fixtures of the rewrite tests: open a file, lay it out again, and write it to another file."""

from __future__ import annotations

import contextlib

import pytest
from open_containers import open_container

from ckptmove.io.rewrite import write_segments
from ckptmove.io.sink import FileSink
from ckptmove.limits import Limits


@contextlib.contextmanager
def _opened(path, limits=None):
    container = open_container(str(path), limits or Limits())
    try:
        yield container
    finally:
        container.source.close()


@pytest.fixture
def opened():
    """Open a container in a context."""
    return _opened


@pytest.fixture
def rewrite():
    """Write a file again with a changed pickle; return the output."""

    def run(path, output, change=lambda pickle: pickle, casts=None, progress=None):
        with _opened(path) as container:
            segments = container.lay_out(change(container.object_pickle()), casts or {})
            with FileSink(str(output), force=True) as sink:
                count = write_segments(container.source, segments, sink, progress)
                sink.commit()
        assert count == output.stat().st_size
        return output

    return run
