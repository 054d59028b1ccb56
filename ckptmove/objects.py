"""What two parts of checkpoints hold that is no tensor, side by side, however each of them keeps it.

Never holds a device against another one where it is told which places name one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.containers.distributed import UNREAD
from ckptmove.inventory.difference import TreeChange, kept_changes
from ckptmove.inventory.tensor_nodes import TensorNodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ckptmove.layouts.stored_part import StoredPart
    from ckptmove.twins import Twins

#: What an optimizer's state_dict is made of, flat or not.
_PARTS: Final = ("state", "param_groups")


class ObjectsBeside:
    """What is no tensor in two parts, side by side.

    Attributes:
        uncompared: paths of what may differ, because one part keeps too little of it to tell.
    """

    def __init__(self, ours: StoredPart, theirs: StoredPart, twins: Sequence[Twins]) -> None:
        """Take two parts.

        Args:
            ours: the one.
            theirs: the one that it should equal.
            twins: optimizers with other keys in the two checkpoints, as :func:`ckptmove.twins.find_twins` has them.
        """
        self._ours, self._theirs = ours, theirs
        own = {id(optimizer) for optimizer in ours.inventory.optimizers}
        self._twins = [twin for twin in twins if id(twin.one) in own]
        self._is_mixed = ours.is_distributed != theirs.is_distributed
        self.uncompared: list[str] = []

    @property
    def are_alike(self) -> bool:
        """Whether both parts are written in one way, so that their trees can be held against each other as they are."""
        return not (self._is_mixed or self._twins)

    @property
    def notes(self) -> Iterator[str]:
        """What was compared in another way than it lies, or not at all, for people."""
        for twin in self._twins:
            where = twin.one.where or "the optimizer"
            unknown = "which parameter is which is not told"
            yield f"{where} has other keys there: {'compared parameter by parameter' if twin.keys else unknown}"
        if self.uncompared:
            more = f" and {len(self.uncompared) - 1:,} more" * (len(self.uncompared) > 1)
            yield f"{self.uncompared[0]}{more} not compared, as a distributed checkpoint keeps it otherwise"

    def changes(self, sites: tuple[Collection[int], Collection[int]] | None = None) -> Iterator[TreeChange]:
        """Each place where they differ, as seen from the parts; fills what could not be compared.

        Args:
            sites: starts in the pickles of both of what may differ, because it follows the device; None where nothing
                may.

        Raises:
            UnreadableInput, LimitExceeded: as their trees.
        """
        wheres = {self._ours.own_name(twin.one.where) for twin in self._twins}

        def is_apart(path: str, key: str) -> bool:
            return path in wheres and key.partition(".")[0] in _PARTS

        trees = self._ours.tree(), self._theirs.tree()
        for change in kept_changes(*trees, TensorNodes(), sites=sites or ((), ()), is_apart=is_apart):
            if self._is_mixed and (change.may_be_kept or UNREAD in {change.ours, change.theirs}):
                self.uncompared.append(change.path)
            else:
                yield change
        for twin in self._twins:
            for path, mine, theirs in twin.changes(flags_count=sites is None):
                yield TreeChange(self._ours.own_name(path), repr(mine), repr(theirs))
