"""What a conversion did not do, though the user may think that it did.

Never changes the plan: it reads the request, the inventory and the plan side by side.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckptmove import devices
from ckptmove.keep import flag_paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.model import Inventory, Mention
    from ckptmove.moves import MovePlan

_SHOWN = 3


def conversion_notes(inventory: Inventory, plan: MovePlan) -> Iterator[str]:
    """One line for each option that met nothing, one for devices that stay named in configs, and one for code."""
    names = [record.name for record in inventory.tensors] + [mention.where for mention in inventory.mentions]
    names += [path for path, _ in flag_paths(inventory)]
    for glob in plan.request.keep:
        if not any(fnmatchcase(name, glob) for name in names):
            yield f"--keep {glob} names nothing in the file; globs match whole names, as in 'ema.*'"
    tags = {record.device for record in inventory.tensors}
    for glob, _ in plan.request.mapping:
        if not any(devices.matches(glob, tag) for tag in tags):
            yield f"--map {glob}=... names no device of the file, which has {', '.join(sorted(tags)) or 'no tensors'}"
    moved = {edit.source for edit in plan.edits}
    edited = {flag.where for flag in plan.flags}
    left = [
        mention
        for mention in inventory.mentions
        if mention.where not in edited
        and any(devices.same_device(mention.value, tag) or mention.value == devices.split(tag)[0] for tag in moved)
    ]
    in_code = [mention for mention in left if _is_in_code(inventory, mention)]
    in_configs = [mention for mention in left if not _is_in_code(inventory, mention)]
    if in_configs:
        yield f"still named in the file's configs: {_some(in_configs)} (--rewrite-strings moves strings)"
    if in_code:
        yield f"still named in the file's code, which is not edited: {_some(in_code)}"


def _is_in_code(inventory: Inventory, mention: Mention) -> bool:
    """Whether a device is named by a line of TorchScript."""
    return inventory.container == "torchscript" and mention.site is None and mention.kind == "torch.device"


def _some(mentions: Sequence[Mention]) -> str:
    more = f" and {len(mentions) - _SHOWN} more" if len(mentions) > _SHOWN else ""
    return ", ".join(f"{mention.where} = {mention.value}" for mention in mentions[:_SHOWN]) + more
