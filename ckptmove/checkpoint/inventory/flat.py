"""Complete the inventory of a format that stores a flat table of tensors, without devices (safetensors)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.roles import role_of_key

if TYPE_CHECKING:
    from ckptmove.model import Inventory

#: Last parts of names of optimizer state: moments of ``torch.optim``.
_MOMENTS: Final = frozenset({"exp_avg", "exp_avg_sq", "exp_inf", "square_avg", "momentum_buffer", "acc_delta"})


def complete(inventory: Inventory) -> Inventory:
    """Set the roles of optimizer tensors by name, and remove the device tags.

    Args:
        inventory: inventory of a file with a flat table of tensors.
    """
    parts = [tensor.name.rpartition(".") for tensor in inventory.tensors]
    states = {holder for holder, _, leaf in parts if leaf in _MOMENTS}
    tensors = tuple(
        tensor._replace(role="optimizer") if holder in states or _is_in_optimizer(tensor.name) else tensor
        for tensor, (holder, _, _) in zip(inventory.tensors, parts, strict=True)
    )
    storages = tuple(storage._replace(tag_sites=(), class_sites=()) for storage in inventory.storages)
    return replace(inventory, tensors=tensors, storages=storages)


def _is_in_optimizer(name: str) -> bool:
    """Whether a name begins with the key of an optimizer, as in Megatron, which saves its state with the model."""
    first, dot, _ = name.partition(".")
    return bool(dot) and role_of_key(first) == "optimizer"
