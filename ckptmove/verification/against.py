"""The second half of the restore check: nothing was lost or changed on the way from the original.

Never compares devices or group flags: those are what a conversion is there to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ckptmove.dtypes import CAST_DOWN
from ckptmove.verification.checks import Offenders
from ckptmove.verification.restore import dense_records, raw_bytes, same_bytes
from ckptmove.verification.state import bits, dtype_of

if TYPE_CHECKING:
    from ckptmove.model import Inventory, OptimizerRecord, TensorRecord
    from ckptmove.verification.state import StoredTensors

_FLAGS: Final = frozenset({"capturable", "fused"})


class OriginalTensors:
    """The original's tensors under the names and with the dtypes of the checkpoint that came from it."""

    def __init__(self, inventory: Inventory, stored: StoredTensors) -> None:
        self._records = {record.name: record for record in dense_records(inventory)}
        self._stored = stored

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """The original of a record, cast as it was.

        Raises:
            KeyError: the original has no such tensor.
        """
        return self._stored.tensor(self._records[record.name]).to(dtype_of(record.dtype))


def differences(
    inventory: Inventory, stored: StoredTensors, original: Inventory, original_stored: StoredTensors
) -> Offenders:
    """Where a checkpoint is not its original, devices and flags aside: names, shapes, values, options."""
    found = Offenders()
    _compare_options(inventory, original, found)
    ours = {record.name: record for record in dense_records(inventory)}
    theirs = {record.name: record for record in dense_records(original)}
    for name in theirs:
        if name not in ours:
            found.add(f"{name} is missing")
    for name, record in ours.items():
        if name not in theirs:
            found.add(f"{name} is not in the original")
            continue
        text = _difference(record, stored, theirs[name], original_stored)
        if text:
            found.add(f"{name}: {text}")
    return found


def _difference(ours: TensorRecord, stored: StoredTensors, theirs: TensorRecord, original_stored: StoredTensors) -> str:
    if ours.shape != theirs.shape:
        return f"shape {ours.shape} in place of {theirs.shape}"
    is_cast = ours.dtype == CAST_DOWN.get(theirs.dtype)
    if ours.dtype != theirs.dtype and not is_cast:
        return f"dtype {ours.dtype} in place of {theirs.dtype}"
    if stored.span(ours) is None or original_stored.span(theirs) is None:
        return "its bytes are not stored plainly"
    values, reference = stored.tensor(ours), original_stored.tensor(theirs)
    if is_cast:
        same = torch.equal(bits(values), bits(reference.to(values.dtype)))
    elif ours.stride == theirs.stride:
        same = same_bytes(raw_bytes(values), raw_bytes(reference))
    else:
        return f"stride {ours.stride} in place of {theirs.stride}"
    return "" if same else "other bits" + (f" than {theirs.dtype} cast to {ours.dtype}" if is_cast else "")


def _compare_options(inventory: Inventory, original: Inventory, found: Offenders) -> None:
    if len(inventory.optimizers) != len(original.optimizers):
        found.add(f"{len(inventory.optimizers)} optimizers in place of {len(original.optimizers)}")
        return
    for ours, theirs in zip(inventory.optimizers, original.optimizers, strict=True):
        mine, other = _options(ours), _options(theirs)
        for where in [*other, *(where for where in mine if where not in other)]:
            if where not in mine or where not in other or repr(mine[where]) != repr(other[where]):
                found.add(f"{where} is {mine.get(where, 'absent')!r} in place of {other.get(where, 'absent')!r}")


def _options(optimizer: OptimizerRecord) -> dict[str, object]:
    """Every plain value of an optimizer by its path, flags aside."""
    values: dict[str, object] = {}
    for group in optimizer.groups:
        values[f"{group.where}.params"] = group.params
        values.update((f"{group.where}.{name}", value) for name, value in group.options if name not in _FLAGS)
    for entry in optimizer.state:
        values.update((f"{optimizer.where}.state.{entry.key}.{key}".lstrip("."), value) for key, value in entry.scalars)
    return values
