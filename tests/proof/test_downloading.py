"""Files of `verify` that are not local."""

from __future__ import annotations

import pytest

from ckptmove.io.remote.address import Address
from ckptmove.io.remote.errors import NotLocal
from ckptmove.proof.downloading import NotDownloaded, downloaded
from ckptmove.proof.request import VerifyRequest

URL = Address("https://host/run.pth")


def test_a_url_is_not_local_without_a_download():
    for request, error in (
        (VerifyRequest(URL), NotDownloaded),
        (VerifyRequest("run.pth", against=URL), NotLocal),
        (VerifyRequest(URL, against=URL, download="here.pth"), NotLocal),
    ):
        with pytest.raises(error):
            downloaded(request, None, pytest.fail)
    local = VerifyRequest("run.pth", download="here.pth")
    assert downloaded(local, None, pytest.fail) is local
