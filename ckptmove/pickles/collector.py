"""Pause Python's garbage collector while millions of small objects are created."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the garbage collector, then restore its earlier state. Can be nested.

    The tree of a pickle has no cycles, and the collector would visit all of it again and again.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
