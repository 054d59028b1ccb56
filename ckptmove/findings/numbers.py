"""Rules about plain numbers of schedulers and scalers: N501 and N503. ``verify`` finds N501 and N502 in tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.findings.catalogue import found
from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.findings.context import Context
    from ckptmove.model import Finding, Inventory


def not_finite(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """N501: a number of a scheduler is NaN, or a learning rate of it is infinite."""
    broken = [one for one in inventory.broken_numbers if not one.is_scale]
    if broken:
        message = some([f"{one.where} is {one.value}" for one in broken])
        fix = "resume from an earlier checkpoint, or build the scheduler anew"
        yield found("N501", message, [one.where for one in broken], fix)


def scaler_scale(inventory: Inventory, _context: Context) -> Iterator[Finding]:
    """N503: the scale of a ``GradScaler`` is 0, infinite or NaN."""
    broken = [one for one in inventory.broken_numbers if one.is_scale]
    if broken:
        message = some([f"{one.where} is {one.value}" for one in broken])
        fix = "in the training script, make a new GradScaler in place of restoring this one"
        yield found("N503", message, [one.where for one in broken], fix)


#: The rules, in the order of the codes.
RULES: Final = (not_finite, scaler_scale)
