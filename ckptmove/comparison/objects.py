"""Compare the objects other than tensors in two parts of checkpoints, whose formats may differ."""

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
    from ckptmove.comparison.rekeyed import RekeyedOptimizer

#: Keys of an optimizer's state_dict, flat or not.
_PARTS: Final = ("state", "param_groups")


class ObjectComparison:
    """Comparison of the objects other than tensors in two parts.

    Attributes:
        keeps_less: whether a part is a distributed checkpoint, which stores less than a file: for example, no order of
            keys, because that depends on the number of ranks.
        is_mixed: whether one part is a distributed checkpoint and the other one a file.
        uncompared: paths of objects that may differ, because one part stores too little of them.
        opaque: paths of options and state that are objects of some class and cannot be compared.
    """

    def __init__(self, ours: OpenPart, theirs: OpenPart, rekeyed: Sequence[RekeyedOptimizer]) -> None:
        """Prepare the comparison of two parts.

        Args:
            ours: the first part.
            theirs: the part that it should equal.
            rekeyed: optimizers whose keys or form differ (:func:`ckptmove.comparison.rekeyed.find_rekeyed`).
        """
        self._ours, self._theirs = ours, theirs
        own = {id(optimizer) for optimizer in ours.inventory.optimizers}
        self._rekeyed = [optimizer for optimizer in rekeyed if id(optimizer.one) in own]
        #: Optimizers compared parameter by parameter. If the parameters cannot be matched, they are compared as stored.
        self._wheres = {ours.own_name(optimizer.one.where) for optimizer in self._rekeyed if optimizer.keys}
        self.keeps_less = ours.is_distributed or theirs.is_distributed
        self.is_mixed = ours.is_distributed != theirs.is_distributed
        self.uncompared: list[str] = []
        self.opaque: list[str] = []

    @property
    def notes(self) -> Iterator[str]:
        """Notes on objects that were not compared, or not compared as stored."""
        for optimizer in self._rekeyed:
            where = optimizer.one.where or "the optimizer"
            how = "compared parameter by parameter" if optimizer.keys else "its parameters could not be matched"
            if optimizer.is_reordered:
                yield f"{where} lists its parameters in another order on the other side: compared by name"
            else:
                yield f"{where} has different keys on the other side: {how}"
        if self.uncompared:
            more = f" and {len(self.uncompared) - 1:,} more" * (len(self.uncompared) > 1)
            yield f"{self.uncompared[0]}{more} not compared: stored differently in a distributed checkpoint"
        if self.opaque:
            more = f" and {len(self.opaque) - 1:,} more" * (len(self.opaque) > 1)
            yield f"{self.opaque[0]}{more} not compared: not a plain value"

    def is_apart(self, path: str, key: str) -> bool:
        """Whether a key of the dict at a path in the part is compared parameter by parameter."""
        return path in self._wheres and key.partition(".")[0] in _PARTS

    def kept_changes(self, sites: tuple[Collection[int], Collection[int]] = ((), ())) -> Iterator[TreeChange]:
        """Differences between the parts, in objects that a distributed checkpoint stores.

        Args:
            sites: starts of operations, in each pickle, whose values may differ because they follow the device.

        Raises:
            UnreadableInput, LimitExceeded: if a tree cannot be read, or needs more than the limits allow.
        """
        trees = self._ours.tree(), self._theirs.tree()
        for change in kept_changes(*trees, TensorNodes(), sites=sites, is_apart=self.is_apart):
            if self.is_mixed and (change.may_be_kept or UNREAD in {change.ours, change.theirs}):
                self.uncompared.append(change.path)
            else:
                yield change

    def rekeyed_changes(self, *, flags_count: bool) -> Iterator[TreeChange]:
        """Differences in options and other non-tensor state between optimizers, matched by parameter.

        Args:
            flags_count: whether options that follow the device are compared too.
        """
        for optimizer in self._rekeyed:
            for path, mine, theirs in optimizer.changes(flags_count=flags_count):
                if OPAQUE in (mine, theirs) and ABSENT not in (mine, theirs):
                    self.opaque.append(path)
                else:
                    yield TreeChange(self._ours.own_name(path), repr(mine), repr(theirs))
