"""A sample of a checkpoint: the parameters and tensors that stand for all where all would take too long.

Never looks at a tensor's bytes, and never chooses by chance: the same seed chooses the same.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptmove.torch_facts.optimizers import keeps_state_on_first
from ckptmove.verification.evidence import SampleSize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Inventory, OptimizerRecord

_Item = TypeVar("_Item")


class Sample(NamedTuple):
    """What is looked at.

    Attributes:
        names: of the tensors.
        keys: of the parameters that are stepped, for each optimizer in its turn: the paths of two may read alike.
        size: how much that is.
    """

    names: frozenset[str]
    keys: tuple[frozenset[str], ...]
    size: SampleSize


def choose(inventory: Inventory, pairings: Sequence[tuple[OptimizerRecord, Pairing]], count: int, seed: int) -> Sample:
    """A sample that is spread over each optimizer's groups, and over all that no optimizer trains.

    Args:
        inventory: of the checkpoint.
        pairings: its optimizers, each with its parameters.
        count: how many parameters of each optimizer, with all of their state, and how many of the other tensors.
        seed: another one chooses others.

    Returns:
        The sample. Of an optimizer that steps its parameters as one vector it has all, however many they are.
    """
    random = Random(seed)  # noqa: S311  # it is to be the same again, not to be secret
    names: set[str] = set()
    keys: list[frozenset[str]] = []
    trained: set[str] = set()
    listed = 0
    for optimizer, pairing in pairings:
        own = dict.fromkeys(key for group in optimizer.groups for key in group.params)
        is_one = optimizer.algorithm is not None and keeps_state_on_first(optimizer.algorithm)
        chosen = frozenset(own if is_one else _spread(list(own), count, random))
        keys.append(chosen)
        listed += len(own)
        found = [(key, record.name) for key, record in pairing.matches if record is not None]
        found += [(entry.key, record.name) for entry in optimizer.state for _, record in entry.tensors]
        found = [(key, name) for key, name in found if key in own]  # state that no group lists is one of the others
        trained.update(name for _, name in found)
        names.update(name for key, name in found if key in chosen)
    others = dict.fromkeys(record.name for record in inventory.tensors if record.name not in trained)
    names.update(_spread(list(others), count, random))
    size = SampleSize(
        asked=count,
        parameters=sum(map(len, keys)),
        of_parameters=listed,
        tensors=sum(record.name in names for record in inventory.tensors),
        of_tensors=len(inventory.tensors),
    )
    return Sample(frozenset(names), tuple(keys), size)


def _spread(items: Sequence[_Item], count: int, random: Random) -> list[_Item]:
    """One of each of so many runs of equal length; all where there are no more."""
    if len(items) <= count:
        return list(items)
    bounds = [len(items) * place // count for place in range(count + 1)]
    return [items[random.randrange(start, end)] for start, end in pairwise(bounds)]
