"""What two parts of checkpoints hold that is no tensor, side by side, however each of them keeps it.

Never holds a device against another one where it is told which places name one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.checkpoint.inventory.difference import TreeChange, kept_changes
from ckptmove.checkpoint.inventory.tensor_nodes import TensorNodes
from ckptmove.comparison.rekeyed import ABSENT
from ckptmove.formats.dcp.checkpoint import UNREAD
from ckptmove.model import OPAQUE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.comparison.rekeyed import Twins

#: What an optimizer's state_dict is made of, flat or not.
_PARTS: Final = ("state", "param_groups")


class ObjectsBeside:
    """What is no tensor in two parts, side by side.

    Attributes:
        keeps_less: whether one of them is a distributed checkpoint, which keeps no order of keys, among other things:
            that hangs on the number of ranks.
        is_mixed: whether the other one is a file then, which keeps more.
        uncompared: paths of what may differ, because one part keeps too little of it to tell.
        opaque: paths of options and state that are objects of some class, of which nobody can tell.
    """

    def __init__(self, ours: OpenPart, theirs: OpenPart, twins: Sequence[Twins]) -> None:
        """Take two parts.

        Args:
            ours: the one.
            theirs: the one that it should equal.
            twins: optimizers with other keys in the two checkpoints (:func:`ckptmove.comparison.rekeyed.find_twins`).
        """
        self._ours, self._theirs = ours, theirs
        own = {id(optimizer) for optimizer in ours.inventory.optimizers}
        self._twins = [twin for twin in twins if id(twin.one) in own]
        #: Where it is not known which parameter is which, optimizers are compared as they lie.
        self._wheres = {ours.own_name(twin.one.where) for twin in self._twins if twin.keys}
        self.keeps_less = ours.is_distributed or theirs.is_distributed
        self.is_mixed = ours.is_distributed != theirs.is_distributed
        self.uncompared: list[str] = []
        self.opaque: list[str] = []

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
        if self.opaque:
            more = f" and {len(self.opaque) - 1:,} more" * (len(self.opaque) > 1)
            yield f"{self.opaque[0]}{more} not compared: an object, which is no plain value"

    def is_apart(self, path: str, key: str) -> bool:
        """Whether what is under a key in the dict at a path, seen from the part, is compared parameter by parameter."""
        return path in self._wheres and key.partition(".")[0] in _PARTS

    def kept_changes(self, sites: tuple[Collection[int], Collection[int]] = ((), ())) -> Iterator[TreeChange]:
        """Each place where they differ, as far as a distributed checkpoint keeps what stands there.

        Args:
            sites: starts in the pickles of both of what may differ, because it follows the device.

        Raises:
            UnreadableInput, LimitExceeded: as their trees.
        """
        trees = self._ours.tree(), self._theirs.tree()
        for change in kept_changes(*trees, TensorNodes(), sites=sites, is_apart=self.is_apart):
            if self.is_mixed and (change.may_be_kept or UNREAD in {change.ours, change.theirs}):
                self.uncompared.append(change.path)
            else:
                yield change

    def twin_changes(self, *, flags_count: bool) -> Iterator[TreeChange]:
        """Each option, and what else of an optimizer is no tensor, that differs from that of the same parameter.

        Args:
            flags_count: whether options that follow the device are held against each other, too.
        """
        for twin in self._twins:
            for path, mine, theirs in twin.changes(flags_count=flags_count):
                if OPAQUE in (mine, theirs) and ABSENT not in (mine, theirs):
                    self.opaque.append(path)
                else:
                    yield TreeChange(self._ours.own_name(path), repr(mine), repr(theirs))
