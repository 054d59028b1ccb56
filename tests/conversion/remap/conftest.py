"""The comparison of ``verify --against``, made in this process."""

from __future__ import annotations

import pytest
from wrapped import data_parallel_on_cpu  # noqa: F401  # a fixture for every test here

from ckptmove.api import _remap
from ckptmove.verification.request import VerifyRequest
from ckptmove.verification.worker import run

_NONE = {
    "strip_prefix": False, "add_prefix": "", "rename": None, "only": (), "drop": (), "as_root": "", "dtype": None,
    "compact": False, "plain": False,
}  # fmt: skip


@pytest.fixture
def compared():
    """The number of differences between a checkpoint and its original."""

    def compare(path, original, **options):
        messages = []
        remap = _remap(**{**_NONE, **options})
        run(VerifyRequest(path=str(path), to="cpu", against=str(original), remap=remap), messages.append)
        check = next(one["check"] for one in messages if one.get("check", {}).get("name") == "restore")
        return dict(check["evidence"])["changed"]

    return compare
