"""What a flat table of tensors leaves unsaid: which of its names are an optimizer's, and no tags.

Never renames a tensor: the dots in its name are all the tree that there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.roles import role_of_key

if TYPE_CHECKING:
    from ckptmove.model import Inventory

#: Last parts of names that are no parameter's: moments of ``torch.optim``.
_MOMENTS: Final = frozenset({"exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "momentum_buffer", "acc_delta"})


def complete(inventory: Inventory) -> Inventory:
    """The inventory of a file whose tensors lie in one flat table, by what the names alone tell.

    Args:
        inventory: as it was built from the tree that the table stands for.
    """
    parts = [tensor.name.rpartition(".") for tensor in inventory.tensors]
    states = {holder for holder, _, leaf in parts if leaf in _MOMENTS}
    tensors = tuple(
        tensor._replace(role="optimizer") if holder in states or _is_optimizers(tensor.name) else tensor
        for tensor, (holder, _, _) in zip(inventory.tensors, parts, strict=True)
    )
    storages = tuple(storage._replace(tag_sites=(), class_sites=()) for storage in inventory.storages)
    return replace(inventory, tensors=tensors, storages=storages)


def _is_optimizers(name: str) -> bool:
    """Whether a name begins with the key of an optimizer, as Megatron keeps its state beside the model."""
    first, dot, _ = name.partition(".")
    return bool(dot) and role_of_key(first) == "optimizer"
