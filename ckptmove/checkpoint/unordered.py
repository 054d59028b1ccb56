"""Which tensor an optimizer's state belongs to where nothing tells their order: what their shapes leave.

Never says that a match is the only one where another is as good.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.state_dicts import Shape
    from ckptmove.model import TensorRecord

#: The shape that a parameter must have by its state, and the dtype that it probably has; None where that is not told.
Known: TypeAlias = "tuple[Shape, str] | None"

_NUMBER: Final = re.compile(r"([0-9]+)")


def match_unordered(
    states: Sequence[Known], tensors: Sequence[TensorRecord]
) -> tuple[list[TensorRecord | None], bool] | None:
    """A tensor of its own for each state, by shape; among those of one shape by dtype, and then as people count.

    Args:
        states: what is known of each parameter, in the order of the groups; where nothing is known of any, each gets
            whatever tensor comes next.
        tensors: those that can be parameters, in any order.

    Returns:
        The tensors, and whether no other match is as good; None where there are fewer tensors of a shape than states.
    """
    wanted = Counter(known[0] for known in states if known is not None)
    there = Counter(tensor.shape for tensor in tensors)
    if len(states) > len(tensors) or not wanted <= there:
        return None
    counted = sorted(tensors, key=_natural_key)
    if not wanted:
        return list(counted[: len(states)]), len(tensors) == 1
    found: list[TensorRecord | None] = [None] * len(states)
    for with_dtype in (True, False):
        taken = {id(tensor) for tensor in found}
        pools: dict[object, deque[TensorRecord]] = {}
        for tensor in counted:
            if id(tensor) not in taken:
                key = (tensor.shape, tensor.dtype) if with_dtype else tensor.shape
                pools.setdefault(key, deque()).append(tensor)
        for place, known in enumerate(states):
            if known is not None and found[place] is None:
                pool = pools.get(known if with_dtype else known[0])
                found[place] = pool.popleft() if pool else None
    return found, all(there[shape] == 1 for shape in wanted)


def _natural_key(tensor: TensorRecord) -> tuple[tuple[int, str], ...]:
    """A name as something to sort by, its numbers as numbers: layer 2 before layer 10."""
    return tuple((len(part.lstrip("0")) if part.isdigit() else 0, part) for part in _NUMBER.split(tensor.name))
