"""The rules that apply to a checkpoint, and the function that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ckptmove.checkpoint.directories import DirectoryInventory
from ckptmove.checkpoint.pairing import pair_all
from ckptmove.findings import archive, devices, dtypes, keys, resume, safety
from ckptmove.findings.candidates import find_lacking
from ckptmove.findings.context import is_incomplete, target_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory

FindingRule: TypeAlias = "Callable[[Inventory, Context], Iterable[Finding]]"

#: Rules that compare files with each other: skipped if a file could not be read.
_OF_THE_WHOLE: Final[tuple[FindingRule, ...]] = (
    devices.mixed_devices,
    devices.optimizer_device,
    resume.resume_incomplete,
    resume.scheduler_rate,
)


def rules_for(inventory: Inventory) -> Iterator[FindingRule]:
    """The rules that can find something in a checkpoint, in the order of the codes."""
    is_directory = isinstance(inventory, DirectoryInventory)
    yield from devices.RULES
    if inventory.optimizers:
        from ckptmove.findings import optimizer

        yield from optimizer.RULES
    yield from (*resume.RULES, *dtypes.RULES)
    if inventory.broken_numbers:
        from ckptmove.findings import numbers

        yield from numbers.RULES
    yield from (*keys.RULES, *safety.RULES)
    if is_directory:
        from ckptmove.findings import beside

        yield from beside.RULES
    yield from archive.RULES
    if is_directory or inventory.facts:
        from ckptmove.findings import saves

        yield from saves.RULES


def find_all(inventory: Inventory, context: Context) -> tuple[Finding, ...]:
    """Run the rules; return their findings in the order of the codes.

    If a file of a directory could not be read, no finding depends on its content.
    """
    context = context._replace(
        home=target_device(inventory, context) or "",
        pairings=context.pairings or pair_all(inventory),
        lacking=find_lacking(inventory),
    )
    left_out = _OF_THE_WHOLE if is_incomplete(inventory) else ()
    rules = (rule for rule in rules_for(inventory) if rule not in left_out)
    return tuple(one for rule in rules for one in rule(inventory, context))
