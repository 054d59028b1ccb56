"""Build the part of an inventory that a load needs, without a walk over the tree: storages and imported names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.checkpoint.inventory.apart import judged
from ckptmove.model import Inventory
from ckptmove.pickles.tensors import TensorReader

if TYPE_CHECKING:
    from ckptmove.formats.contract import Container
    from ckptmove.pickles.state import Machine


def storage_inventory(container: Container, machine: Machine) -> Inventory:
    """The storages and the imported names of a file."""
    reader = TensorReader()
    reader.gather(machine.persistents)
    storages = reader.storages()
    container.locate(storages)
    return Inventory(
        path=container.source.path,
        container=container.name,
        layout="other",
        size_bytes=container.source.size,
        storages=storages,
        globals=judged(machine, container.opened),
    )
