"""The environment for processes of tests that run no ckptmove: coverage would take as long as they do."""

from __future__ import annotations

import os


def environment():
    """Variables without those by which coverage measures a process that is started."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
