"""Count the processor cores that this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Number of cores; the system may reserve others for other processes."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
