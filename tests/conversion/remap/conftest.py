"""Run the comparison of ``verify --against`` in this process."""

from __future__ import annotations

import pytest
from answers import checks_of
from wrapped import data_parallel_on_cpu  # noqa: F401  # a fixture for every test here

from ckptmove.api.arguments import remap_of
from ckptmove.proof.request import VerifyRequest
from ckptmove.training.worker import run


@pytest.fixture
def compared():
    """The number of differences between a checkpoint and its original."""

    def compare(path, original, **options):
        messages = []
        run(VerifyRequest(path=str(path), to="cpu", against=str(original), remap=remap_of(options)), messages.append)
        return checks_of(messages)["restore"]["evidence"]["changed"]

    return compare
