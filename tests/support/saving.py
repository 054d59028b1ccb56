"""What ``torch.save`` can be told to write otherwise; a test is skipped where this torch cannot be told."""

from __future__ import annotations

import contextlib

import pytest
import torch

#: Of torch, where no record of the archive says otherwise.
ALIGNMENT = 64


@contextlib.contextmanager
def crcs(written):
    """The time in which torch writes CRCs, or zeros in their place."""
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
    """The time in which torch begins each storage at a multiple of so many bytes."""
    if nbytes == ALIGNMENT:
        yield
        return
    config = pytest.importorskip("torch.utils.serialization.config", reason="this torch knows one alignment")
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch knows one alignment")
    with config.patch("save.storage_alignment", nbytes):
        yield
