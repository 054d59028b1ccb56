"""Options of ``torch.save``; a test is skipped if this torch lacks the option."""

from __future__ import annotations

import contextlib

import pytest
import torch

#: Alignment in bytes of an archive without a record for it.
ALIGNMENT = 64


@contextlib.contextmanager
def crcs(written):
    """Make torch write CRCs, or zeros instead, in a context."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        if not written:
            pytest.skip("this torch writes every CRC")
        yield
        return
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(written)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


@contextlib.contextmanager
def aligned(nbytes):
    """Make torch align storages to a number of bytes, in a context."""
    if nbytes == ALIGNMENT:
        yield
        return
    config = pytest.importorskip("torch.utils.serialization.config", reason="this torch knows one alignment")
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch knows one alignment")
    with config.patch("save.storage_alignment", nbytes):
        yield
