"""Read the inventory of a saved object."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest
import torch

from ckptmove.opening.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.model import Inventory


@pytest.fixture
def inventory_of(tmp_path) -> Callable[..., Inventory]:
    """Save an object with torch and read its inventory."""

    def read(obj: object, **options: object) -> Inventory:
        path = tmp_path / "saved.pt"
        torch.save(obj, path, **options)
        with open_checkpoint(str(path)) as checkpoint:
            return checkpoint.inventory

    return read


@pytest.fixture
def read_pickle(tmp_path) -> Callable[[bytes], Inventory]:
    """Read the inventory of an archive with only a pickle."""

    def read(data: bytes) -> Inventory:
        path = tmp_path / "hand_made.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", data)
        with open_checkpoint(str(path)) as checkpoint:
            return checkpoint.inventory

    return read
