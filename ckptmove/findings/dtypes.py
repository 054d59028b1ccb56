"""Rules about dtypes: T401.

Never knows which device lacks what: that is ``ckptmove.devices``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.devices import same_device, split, unsupported_dtypes
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import census, convert_command, target_device
from ckptmove.pairing import BOOKKEEPING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory, TensorRecord


def dtype_unsupported(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """T401: the target lacks a dtype of a tensor that belongs there.

    Without a named target only tensors that claim to be there are judged: others may be on the CPU for this reason.
    """
    target = target_device(inventory, context)
    lacking = unsupported_dtypes(target) if target is not None else frozenset()
    if target is None or not lacking:
        return
    tensors = [
        tensor
        for tensor in inventory.tensors
        if tensor.dtype in lacking
        and not _stays(tensor)
        and (context.target is not None or same_device(tensor.device, target))
    ]
    if tensors:
        message = f"{split(target)[0]} has no {census(tensor.dtype for tensor in tensors)}"
        where = [tensor.name for tensor in tensors]
        yield found("T401", message, where, convert_command(inventory, context, "--cast"))


def _stays(tensor: TensorRecord) -> bool:
    """RNG states and step counters stay on the CPU, whatever the target; a float64 model has float64 counters."""
    key = tensor.name.rpartition(".")[2]
    return tensor.role == "rng" or (tensor.role == "optimizer" and not tensor.shape and key in BOOKKEEPING)
