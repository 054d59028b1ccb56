"""Build the part of an inventory that a load needs, without a walk over the tree: storages and imported names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.model import Inventory
from ckptmove.pickles.tensors import TensorReader
from ckptmove.torch_facts.weights_only import classify

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmove.formats.contract import Container
    from ckptmove.model import GlobalUse
    from ckptmove.pickles.state import Machine


#: Classes of an archive's own code, and functions of TorchScript's reader. No load imports either of them.
SCRIPT_NAMES: Final = ("__torch__.", "torch.jit._pickle.")


def storage_inventory(container: Container, machine: Machine) -> Inventory:
    """The storages and the imported names of a file.

    Args:
        container: the file.
        machine: machine that has read its pickle.

    Raises:
        NeedsEveryOperation, DamagedArchive: as :func:`ckptmove.checkpoint.inventory.build.build_inventory`.
    """
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
        globals=judged(machine.globals, container),
    )


def judged(names: Iterable[str], container: Container) -> tuple[GlobalUse, ...]:
    """Classify imported names; those whose calls the container has read itself are not dangerous."""
    opened = container.opened
    return tuple(classify(name)._replace(verdict="unknown") if name in opened else classify(name) for name in names)
