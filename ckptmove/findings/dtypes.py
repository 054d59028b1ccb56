"""Rules about dtypes: T401 and T402."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.scales import scaled_weights
from ckptmove.errors import UncastableDtype
from ckptmove.findings.catalogue import found
from ckptmove.findings.context import census, convert_command, target_device
from ckptmove.text import Argument, amount
from ckptmove.torch_facts.devices import same_device, split, unsupported_dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.checkpoint.scales import ScaledWeight
    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory


def dtype_unsupported(inventory: Inventory, context: Context) -> Iterator[Finding]:
    """T401: the target does not support the dtype of a tensor that ``convert`` would move there.

    If the user names no target, only tensors already on that device count: others may be on the CPU for this reason.
    """
    target = target_device(inventory, context)
    lacking = unsupported_dtypes(target) if target is not None else frozenset()
    held = {one.dtype for one in inventory.storages} | {one.dtype for one in inventory.tensors}
    if target is None or lacking.isdisjoint(held):
        return
    from ckptmove.conversion.plan import dtypes_out_of_place
    from ckptmove.moves import MoveRequest

    away = {tensor.name for tensor in inventory.tensors if not same_device(tensor.device, target)}
    lost = [
        (name, dtype)
        for name, dtype in dtypes_out_of_place(inventory, MoveRequest(to=target))
        if name not in context.kept and (context.target is not None or name not in away)
    ]
    if lost:
        message = f"{split(target)[0]} has no {census(dtype for _, dtype in lost)}"
        where = [name for name, _ in lost]
        yield found("T401", message, where, _fix(inventory, context, target, where))


def stored_scales(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """T402: quantized weights are stored beside their scales."""
    pairs = scaled_weights(inventory.tensors)
    if pairs:
        weights: dict[str, ScaledWeight] = {}
        for pair in pairs:
            weights.setdefault(pair.weight.name, pair)
        held = census(f"{one.weight.dtype} with {one.scale.name.rpartition('.')[2]}" for one in weights.values())
        message = f"{amount(len(weights), 'quantized weight')}, with scales stored beside: {held}"
        yield found("T402", message, weights, "")


def _fix(inventory: Inventory, context: Context, target: str, where: list[str]) -> str:
    from ckptmove.conversion.plan import plan_move
    from ckptmove.moves import MoveRequest

    quantized = {tensor.name for tensor in inventory.tensors if tensor.kind == "quantized"}
    quantized |= {pair.weight.name for pair in scaled_weights(inventory.tensors)}
    first = next((name for name in where if name in quantized), None)
    if first is not None:
        return f"dequantize {first} with the library that quantized it, then convert the new file"
    try:
        plan_move(inventory, MoveRequest(to=target, cast=True))
    except UncastableDtype as error:
        name, dtype = error.tensors[0]
        return f"in the script that reads it, cast {name} from {dtype}: {error.reason}"
    return convert_command(inventory, context, where, Argument("cast", True))


#: The rules, in the order of the codes.
RULES: Final = (dtype_unsupported, stored_scales)
