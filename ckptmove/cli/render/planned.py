"""What ``convert`` would do with the devices of a checkpoint."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.checkpoint.state_dicts import with_wrappers
from ckptmove.conversion.plan import plan_move
from ckptmove.errors import Refused, UsageError
from ckptmove.findings.context import Context, target_device
from ckptmove.formats.facts import facts_of
from ckptmove.moves import MoveRequest
from ckptmove.text import command_line
from ckptmove.torch_facts.devices import parse_target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.cli.render.renderer import InspectAnswer
    from ckptmove.model import Inventory
    from ckptmove.moves import MovePlan


class ConversionEffect(NamedTuple):
    """The effect of a conversion."""

    command: str  # its command line
    counts: Mapping[tuple[str, str], int]  # number of tensors by role and device after it


def conversion_of(answer: InspectAnswer) -> ConversionEffect | None:
    """Plan the conversion to the device that the user expects, or else to that of the model.

    None if the format has no devices, or ``convert`` would refuse it.
    """
    request, inventory = answer.request, answer.result.inventory
    device = request.expect or request.target or target_device(inventory, Context())
    if device is None or not facts_of(inventory.container).is_editable:
        return None
    try:
        plan = plan_move(inventory, MoveRequest(to=parse_target(device), cast=True))
    except (UsageError, Refused):  # torch does not know the device, or the device lacks a dtype
        return None
    casts = ["--cast"] if any(edit.cast for edit in plan.edits) else []
    command = command_line(["ckptmove", "convert", inventory.path, "--to", device, *casts])
    return ConversionEffect(command, _counts(inventory, plan))


def _counts(inventory: Inventory, plan: MovePlan) -> Counter[tuple[str, str]]:
    """The tensors by role and device; a wrapper subclass is where its inner tensors are."""
    targets = {name: edit.target for edit in plan.edits for name in edit.names}
    for record, wrapper in with_wrappers(inventory.tensors):
        if wrapper is not None and record.name in targets:
            targets[wrapper.name] = targets[record.name]
    return Counter((tensor.role, targets.get(tensor.name, tensor.device)) for tensor in inventory.tensors)
