"""Holding Python's cycle collector back while millions of small objects are made.

Never leaves it off: it is as it was when the work is done.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector; nests.

    A tree of a hundred thousand tensors has no cycles of its own, and the collector would visit it over and over.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
