"""Match optimizer state with tensors by shape, if the order of the parameters is lost."""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.state_dicts import Shape
    from ckptmove.model import TensorRecord

#: Shape of a parameter by its state, and its probable dtype; None if the state does not show them.
Known: TypeAlias = "tuple[Shape, str] | None"

_NUMBER: Final = re.compile(r"([0-9]+)")
#: Names of parameters that torch's modules register first, in this order, as they are sorted.
_LEAVES: Final = {"weight": " weight", "bias": " weights bias"}


def match_unordered(
    states: Sequence[Known], tensors: Sequence[TensorRecord]
) -> tuple[list[TensorRecord | None], bool] | None:
    """Assign one tensor to each state, by shape, then by dtype, then by name in natural order.

    Args:
        states: shape and dtype of each parameter, in the order of the groups. If all are None, the tensors are assigned
            in order.
        tensors: tensors that can be parameters, in any order.

    Returns:
        The tensors, and whether no other match is as good; None if a shape has fewer tensors than states.
    """
    wanted = Counter(known[0] for known in states if known is not None)
    there = Counter(tensor.shape for tensor in tensors)
    if len(states) > len(tensors) or not wanted <= there:
        return None
    ordered = sorted(tensors, key=_natural_order)
    if not wanted:
        return list(ordered[: len(states)]), len(tensors) == 1
    found: list[TensorRecord | None] = [None] * len(states)
    for with_dtype in (True, False):
        taken = {id(tensor) for tensor in found}
        pools: dict[object, deque[TensorRecord]] = {}
        for tensor in ordered:
            if id(tensor) not in taken:
                key = (tensor.shape, tensor.dtype) if with_dtype else tensor.shape
                pools.setdefault(key, deque()).append(tensor)
        for place, known in enumerate(states):
            if known is not None and found[place] is None:
                pool = pools.get(known if with_dtype else known[0])
                found[place] = pool.popleft() if pool else None
    return found, all(there[shape] == 1 for shape in wanted)


def _natural_order(tensor: TensorRecord) -> tuple[tuple[int, str], ...]:
    """Return a sort key that compares the numbers in a name as numbers: layer 2 before layer 10.

    A weight comes before the bias of its module, as in torch's own modules.
    """
    module, dot, leaf = tensor.name.rpartition(".")
    name = f"{module}{dot}{_LEAVES.get(leaf, leaf)}"
    return tuple((len(part.lstrip("0")) if part.isdigit() else 0, part) for part in _NUMBER.split(name))
