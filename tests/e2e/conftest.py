from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _as_users_start_it(started_children):
    """Nothing of these tests is shared between processes."""
