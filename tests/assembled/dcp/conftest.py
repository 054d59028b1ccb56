"""Distributed checkpoints."""

from __future__ import annotations

import pytest
from distributed_checkpoints import HALVES, Distributed


@pytest.fixture
def distributed():
    return Distributed


@pytest.fixture
def trained(tmp_path):
    return Distributed.save(tmp_path / "run", Distributed.trained_tree())


@pytest.fixture
def halves(tmp_path):
    """A tensor in two files."""
    return Distributed.save_ranks(tmp_path / "halves", HALVES)
