"""Find the plain numbers of schedulers and of a ``GradScaler`` that training cannot go on from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.shapes import key_text, members
from ckptmove.model import BrokenNumber
from ckptmove.pickles.tree import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.model import Role
    from ckptmove.pickles.tree import Dict

#: Scheduler keys whose values must be finite; others may be infinite, for example the best loss so far.
_RATES: Final = frozenset({"base_lrs", "_last_lr", "min_lrs", "eta_min"})


def broken_numbers(pairs: Dict, role: Role, prefix: str) -> Iterator[BrokenNumber]:
    """Iterate over the broken numbers in the state of a scheduler or a scaler, one for each key.

    ``prefix`` is its path with a dot at its end; empty for the root.
    """
    for key, value, _ in members(pairs):
        numbers = value.items if isinstance(value, Sequence) else (value,)
        broken = next((one for one in numbers if isinstance(one, (int, float)) and _is_broken(role, key, one)), None)
        if broken is not None:
            yield BrokenNumber(prefix + key, role == "scaler", key_text(broken))


def _is_broken(role: Role, key: str, number: float) -> bool:
    is_finite = isinstance(number, int) or math.isfinite(number)
    if role == "scaler":
        return key == "scale" and not (is_finite and number > 0)
    return not is_finite and (math.isnan(number) or key in _RATES)
