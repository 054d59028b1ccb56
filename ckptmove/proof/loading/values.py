"""Build single values of an open checkpoint, as ``load`` builds all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptmove.checkpoint.entries import entries
from ckptmove.proof.loading.objects import build
from ckptmove.proof.loading.storages import Storages

if TYPE_CHECKING:
    from collections.abc import Collection

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.pickles.tree import Value


def values_at(checkpoint: OpenCheckpoint, paths: Collection[str]) -> dict[str, Value]:
    """The values at some paths of a checkpoint, in its trees; the first one if files have the same name."""
    found: dict[str, Value] = {}
    for part in checkpoint.parts if paths else ():
        for member in entries(part.tree(), part.inventory, part.name):
            path = part.full_name(member.path).rstrip(".")
            if path in paths:
                found.setdefault(path, member.value)
    return found


def built(checkpoint: OpenCheckpoint, value: Value, deepest: int) -> Any:
    """A value as ``torch.load(weights_only=True)`` would return it, on the CPU; errors as of :func:`build`."""
    homes = {one.key: (part, one) for part in checkpoint.parts for one in part.inventory.storages}
    with Storages(homes, dict.fromkeys(homes, "cpu")) as storages:
        return build(value, storages.storage, deepest)
