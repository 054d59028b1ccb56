"""Choose a sample of a checkpoint's parameters and tensors (``--sample``).

The choice reads no tensor, and the same seed gives the same sample.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptmove.proof.evidence import SampleSize
from ckptmove.torch_facts.optimizers import keeps_state_on_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Inventory, OptimizerRecord

_Item = TypeVar("_Item")


class Sample(NamedTuple):
    """The tensors and parameters to check."""

    names: frozenset[str]  # names of the tensors
    #: keys of the parameters to step, one set for each optimizer; two optimizers may use the same keys.
    keys: tuple[frozenset[str], ...]
    size: SampleSize  # size of the sample


def choose_sample(
    inventory: Inventory, pairings: Sequence[tuple[OptimizerRecord, Pairing]], count: int, seed: int
) -> Sample:
    """Choose a sample that is spread over each optimizer's groups and over all tensors that no optimizer trains.

    Args:
        pairings: the optimizers, each with its parameters.
        count: number of parameters of each optimizer, with all of their state, and number of other tensors.

    Returns:
        The sample. It contains all parameters of an optimizer that steps them as one vector.
    """
    random = Random(seed)  # noqa: S311  # repeatable, not secret
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
        found = [(key, name) for key, name in found if key in own]  # state that no group lists counts as other tensors
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
    """Choose one item from each of ``count`` runs of equal length; all items if there are not more."""
    if len(items) <= count:
        return list(items)
    bounds = [len(items) * place // count for place in range(count + 1)]
    return [items[random.randrange(start, end)] for start, end in pairwise(bounds)]
