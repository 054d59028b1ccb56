"""Build the part of an inventory that a load needs, without a walk over the tree: storages and imported names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ckptmove.model import Inventory
from ckptmove.pickles.tensors import TensorReader
from ckptmove.torch_facts.verdicts import uses_of_names

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckptmove.formats.contract import Container
    from ckptmove.model import GlobalUse
    from ckptmove.pickles.state import Machine


#: Classes of an archive's own code, functions of TorchScript's reader, and modules lowered to a backend
#: (torch/csrc/jit/backends/backend_detail.cpp). No load imports one of them.
SCRIPT_NAMES: Final = re.compile(r"__torch__\..*|torch\.jit\._pickle\..*|torch\.jit\.\w+LoweredModule")


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


def judged(machine: Machine, opened: Collection[str] = ()) -> tuple[GlobalUse, ...]:
    """The names that a pickle imports; ``opened``, whose calls the container has read itself, are not dangerous."""
    uses = uses_of_names(machine.globals, machine.runs)
    return tuple(use._replace(verdict="unknown") if use.name in opened else use for use in uses)
