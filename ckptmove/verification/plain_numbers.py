"""Check the plain numbers in the state of schedulers and of a ``GradScaler``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.shapes import as_dict, members, role_of_keys, string_keys
from ckptmove.pickles.tree import Node, Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.pickles.tree import Dict, Value

#: Scheduler keys whose values must be finite; others may be infinite, for example the best loss so far.
_RATES: Final = frozenset({"base_lrs", "_last_lr", "min_lrs", "eta_min"})


def broken_numbers(root: Value) -> Iterator[str]:
    """Numbers that no scheduler or scaler can continue from, as text with their paths.

    Args:
        root: root of the checkpoint's tree.
    """
    stack: list[tuple[str, Value]] = [("", root)]
    seen: dict[int, Value] = {}
    while stack:
        path, value = stack.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        pairs = as_dict(value)
        if pairs is not None:
            yield from _broken(path, pairs)
            stack += ((f"{path}.{key}".lstrip("."), item) for key, item, _ in members(pairs) if isinstance(item, Node))
        elif isinstance(value, Sequence):
            stack += (
                (f"{path}.{index}".lstrip("."), item)
                for index, item in enumerate(value.items)
                if isinstance(item, Node)
            )


def _broken(path: str, pairs: Dict) -> Iterator[str]:
    role = role_of_keys(string_keys(pairs))
    if role not in {"scheduler", "scaler"}:
        return
    for key, value, _ in members(pairs):
        for number in value.items if isinstance(value, Sequence) else (value,):
            if isinstance(number, (int, float)) and not _can_be(role, key, number):
                yield f"{path}.{key} is {number}".lstrip(".")


def _can_be(role: str, key: str, number: float) -> bool:
    if role == "scaler":
        return key != "scale" or (math.isfinite(number) and number > 0)
    return not math.isnan(number) and (key not in _RATES or math.isfinite(number))
