"""Split a checkpoint into shares of about equal size, one for each process of ``verify``."""

from __future__ import annotations

from heapq import heapreplace
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.formats.facts import facts_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import OptimizerRecord
    from ckptmove.proof.checks import Tally


class Share(NamedTuple):
    """The part of a checkpoint that one process checks."""

    is_first: bool  # whether it is the first share, which also has everything that is not a tensor
    names: frozenset[str]  # names of its tensors
    keys: tuple[frozenset[str], ...]  # keys of the parameters to step, one set for each optimizer


class ProcessGroup:
    """The processes that check a checkpoint together: one, unless a subclass has others."""

    rank = 0  # index of this process
    size = 1  # number of processes

    def join(self, tally: Tally) -> None:
        """Send a tally to the process of rank 0; there, add those of the others to it, in the order of the ranks."""


ONE_PROCESS: Final = ProcessGroup()


def share(
    checkpoint: OpenCheckpoint, pairings: Sequence[tuple[OptimizerRecord, Pairing]], index: int, count: int
) -> Share:
    """One of several shares, which together are the checkpoint; every process computes the same ones.

    A parameter and its state are in one share, and so are all tensors of one name, of one storage, or of one file that
    torch loads into memory as a whole, as it does a member of an archive.

    Args:
        pairings: the optimizers, each with its parameters.
        index: index of the share.
        count: number of shares.
    """
    bundles = _Bundles()
    sizes: dict[str, int] = {}
    for record in checkpoint.inventory.tensors:
        sizes[record.name] = sizes.get(record.name, 0) + record.nbytes
        bundles.tie(record.name, *(("storage", one.storage) for one in record.dense() if one.storage is not None))
    for part in checkpoint.parts:
        if _is_loaded_whole(part):
            bundles.tie(("part", part.name), *(record.name for record in part.inventory.tensors))
    keys = [dict.fromkeys(key for group in optimizer.groups for key in group.params) for optimizer, _ in pairings]
    for place, (optimizer, pairing) in enumerate(pairings):
        for key in keys[place]:
            bundles.tie((place, key))
        for key, parameter in pairing.matches:
            if parameter is not None:
                bundles.tie((place, key), parameter.name)
        for entry in optimizer.state:
            bundles.tie((place, entry.key), *(record.name for _, record in entry.tensors))
    mine = _balanced(bundles, sizes, count)[index]
    return Share(
        is_first=index == 0,
        names=frozenset(name for name in sizes if bundles.of(name) in mine),
        keys=tuple(
            frozenset(key for key in of_one if bundles.of((place, key)) in mine) for place, of_one in enumerate(keys)
        ),
    )


def _is_loaded_whole(part: OpenPart) -> bool:
    """Whether torch copies a part into memory instead of mapping it; each process that loads it has a copy."""
    if part.is_assembled:
        return False
    if not part.is_file:
        return True
    kind = facts_of(part.inventory.container)
    if kind.not_weights_only or kind.loader == "safetensors":  # not loaded, or mapped by safetensors
        return False
    return not kind.is_mappable or any(fact.kind == "compressed-storage" for fact in part.inventory.facts)


class _Bundles:
    """Items that have to be in one share: a disjoint-set forest."""

    def __init__(self) -> None:
        self._above: dict[Hashable, Hashable] = {}

    def __iter__(self) -> Iterator[Hashable]:
        """All items, in the order in which they were first tied."""
        return iter(self._above)

    def of(self, item: Hashable) -> Hashable:
        """The item that represents the bundle of another."""
        above = self._above
        while above[item] != item:
            above[item] = above[above[item]]
            item = above[item]
        return item

    def tie(self, first: Hashable, *others: Hashable) -> None:
        """Put items into the bundle of the first one."""
        self._above.setdefault(first, first)
        for other in others:
            self._above.setdefault(other, other)
            self._above[self.of(other)] = self.of(first)


def _balanced(bundles: _Bundles, sizes: Mapping[str, int], count: int) -> list[set[Hashable]]:
    """The bundles of each share: each bundle, the largest first, is added to the share with the fewest bytes."""
    totals: dict[Hashable, int] = {}
    for item in bundles:
        bundle = bundles.of(item)
        totals[bundle] = totals.get(bundle, 0) + (sizes.get(item, 0) if isinstance(item, str) else 0)
    shares: list[set[Hashable]] = [set() for _ in range(count)]
    loads = [(0, place) for place in range(count)]
    for bundle, nbytes in sorted(totals.items(), key=lambda one: -one[1]):
        load, place = loads[0]
        shares[place].add(bundle)
        heapreplace(loads, (load + nbytes, place))
    return shares
