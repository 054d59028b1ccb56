"""Limit the memory that the tensors of a checkpoint take, before torch loads them.

A tensor may have more values than bytes: one value expanded to any size, or overlapping windows. A storage may be
compressed. The memory and time that torch needs would then depend on numbers in a pickle, and not on the file's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import LimitExceeded

if TYPE_CHECKING:
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory

#: Bytes of values allowed for each byte of the files. Compressed weights need two; tied weights count once.
_MOST_PER_BYTE: Final = 64
#: Bytes allowed for any file, so that a small file may expand a mask.
_IN_ANY_CASE: Final = 2**30


def limit_tensor_sizes(checkpoint: OpenCheckpoint, limits: Limits) -> None:
    """Raise if the values of a checkpoint take far more memory than its files have bytes."""
    limit = limits.factor * (_IN_ANY_CASE + _MOST_PER_BYTE * checkpoint.nbytes)
    inventory = checkpoint.inventory
    stored = sum(storage.nbytes for storage in inventory.storages)
    actual = max(stored, _bytes_of_values(inventory))
    if actual > limit:
        raise LimitExceeded(
            "the bytes that its tensors take in memory", limit=limit, actual=actual, path=checkpoint.path
        )


def _bytes_of_values(inventory: Inventory) -> int:
    """Memory of all tensors, without sharing. A tensor with several names counts once; state counts for each step."""
    state = {tensor.name for one in inventory.optimizers for entry in one.state for _, tensor in entry.tensors}
    seen = set()
    total = 0
    for record in inventory.tensors:
        for part in record.dense():
            place = part.storage, part.storage_offset, part.dtype, part.shape, part.stride
            if part.storage is not None and (place not in seen or record.name in state):
                seen.add(place)
                total += part.nbytes
    return total
