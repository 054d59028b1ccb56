"""The environment of test processes that do not run ckptmove, without coverage, which would double their time."""

from __future__ import annotations

import os


def environment():
    """Environment variables, without those that start coverage in a child process."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
