"""How much a checkpoint would have torch read and hold, against what it has.

Never imports torch, and never opens a file.

A tensor may have more values than bytes: one value, expanded to any size, or windows that lie over each other. A
storage may be packed. What torch makes of that, and how long it takes, would follow numbers in a pickle and not the
size of the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.errors import LimitExceeded

if TYPE_CHECKING:
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.limits import Limits
    from ckptmove.model import Inventory

#: Bytes of values for each byte of the files; weights that are packed come to two, and tied ones count once.
_MOST_PER_BYTE: Final = 64
#: Besides: what any file may ask for, so that a small one may expand a mask.
_IN_ANY_CASE: Final = 2**30


def refuse_excess(checkpoint: OpenCheckpoint, limits: Limits) -> None:
    """Refuse a checkpoint whose values take far more than the bytes that they are made of.

    Args:
        checkpoint: the checkpoint.
        limits: what it may ask for.

    Raises:
        LimitExceeded: it asks for more.
    """
    limit = limits.factor * (_IN_ANY_CASE + _MOST_PER_BYTE * checkpoint.nbytes)
    inventory = checkpoint.inventory
    stored = sum(storage.nbytes for storage in inventory.storages)
    actual = max(stored, _bytes_of_values(inventory))
    if actual > limit:
        raise LimitExceeded(
            "the bytes that its tensors take in memory", limit=limit, actual=actual, path=checkpoint.path
        )


def _bytes_of_values(inventory: Inventory) -> int:
    """What all tensors take, each by itself: one that has several names once, but state as often as it is stepped."""
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
