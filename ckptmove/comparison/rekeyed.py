"""Optimizers of two checkpoints that are one and the same, by other keys: numbers, names, or flat.

Never takes two parameters for one where another match is as good.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.pairing import pair_all
from ckptmove.model import OPAQUE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import OptimizerRecord, TensorRecord


class _Absent:
    """What is not there."""

    def __repr__(self) -> str:
        """As it is shown to people."""
        return "absent"


ABSENT: Final = _Absent()
#: Options that follow the device, which a conversion changes.
_FLAGS: Final = frozenset({"capturable", "fused"})


class Twins(NamedTuple):
    """An optimizer in two checkpoints that do not spell it alike.

    Attributes:
        one: as the first has it.
        other: as the second has it.
        keys: of its parameters in the first, each with that in the second; empty where that is not known.
    """

    one: OptimizerRecord
    other: OptimizerRecord
    keys: Mapping[str, str]

    def tensors(self) -> Iterator[tuple[TensorRecord, TensorRecord]]:
        """The state of each parameter, side by side."""
        theirs = {entry.key: dict(entry.tensors) for entry in self.other.state}
        for entry in self.one.state:
            others = theirs.get(self.keys.get(entry.key, ""), {})
            yield from ((tensor, others[key]) for key, tensor in entry.tensors if key in others)

    def changes(self, *, flags_count: bool) -> Iterator[tuple[str, object, object]]:
        """Groups, options, and state that is no tensor, where they are not alike: path, and both values.

        What one side lacks is ``ABSENT``, an object of some class ``OPAQUE``: of that nobody can tell.

        Args:
            flags_count: whether options that follow the device are held against each other, too.
        """
        if not self.keys:
            return
        told: set[str] = set()
        for path, mine, theirs in (*self._groups(), *self._options(), *self._scalars()):
            is_flag = path.rpartition(".")[2] in _FLAGS and not flags_count
            is_same = (type(mine), repr(mine)) == (type(theirs), repr(theirs)) and mine is not OPAQUE
            if path not in told and not (is_same or is_flag):
                told.add(path)
                yield path, mine, theirs

    def _groups(self) -> Iterator[tuple[str, object, object]]:
        """Which parameters are in one group; a flat form has no groups."""
        if self.one.is_flat or self.other.is_flat:
            return
        ours = sorted(sorted(self.keys[key] for key in group.params) for group in self.one.groups)
        theirs = sorted(sorted(group.params) for group in self.other.groups)
        if ours != theirs:
            sizes = [list(map(len, groups)) for groups in (ours, theirs)]
            mine = "groups of other parameters" if sizes[0] == sizes[1] else sizes[0]
            yield f"{self.one.where}.param_groups".lstrip("."), mine, sizes[1]

    def _options(self) -> Iterator[tuple[str, object, object]]:
        theirs = {key: dict(group.options) for group in self.other.groups for key in group.params}
        for group in self.one.groups:
            for key in group.params:
                yield from _side_by_side(group.where, dict(group.options), theirs.get(self.keys[key], {}))

    def _scalars(self) -> Iterator[tuple[str, object, object]]:
        ours = {self.keys.get(entry.key, entry.key): entry for entry in self.one.state}
        theirs = {entry.key: dict(entry.scalars) for entry in self.other.state}
        for key in dict.fromkeys((*ours, *theirs)):
            entry = ours.get(key)
            where = f"{self.one.where}.state.{key if entry is None else entry.key}".lstrip(".")
            yield from _side_by_side(where, {} if entry is None else dict(entry.scalars), theirs.get(key, {}))


def _side_by_side(
    where: str, ours: Mapping[str, object], theirs: Mapping[str, object]
) -> Iterator[tuple[str, object, object]]:
    for name in dict.fromkeys((*ours, *theirs)):
        yield f"{where}.{name}", ours.get(name, ABSENT), theirs.get(name, ABSENT)


def find_twins(one: OpenCheckpoint, other: OpenCheckpoint) -> tuple[Twins, ...]:
    """The optimizers at one place in two checkpoints that have other keys there, or another form.

    Parameters are the same where their keys are, or else where both belong to the tensor of one name in the model.
    """
    # Each for all of its optimizers at once, and only where one asks.
    ours_paired, theirs_paired = (cache(partial(pair_all, side.inventory)) for side in (one, other))
    theirs = {record.where.removeprefix(other.top): at for at, record in enumerate(other.inventory.optimizers)}
    found = []
    for at, record in enumerate(one.inventory.optimizers):
        place = theirs.get(record.where.removeprefix(one.top))
        twin = None if place is None else other.inventory.optimizers[place]
        if twin is None or place is None or (_keys(record), record.is_flat) == (_keys(twin), twin.is_flat):
            continue
        keys = {key: key for key in _keys(record)}
        if _keys(record) != _keys(twin):
            ours, others = _by_tensor(one, ours_paired()[at]), _by_tensor(other, theirs_paired()[place])
            keys = {key: others[name] for name, key in ours.items()} if ours.keys() == others.keys() else {}
        found.append(Twins(record, twin, keys))
    return tuple(found)


def _keys(optimizer: OptimizerRecord) -> frozenset[str]:
    return frozenset(key for group in optimizer.groups for key in group.params)


def _by_tensor(side: OpenCheckpoint, pairing: Pairing) -> dict[str, str]:
    """The keys of an optimizer's parameters by the names of their tensors; none where one of them is not known."""
    found = {record.name.removeprefix(side.top): key for key, record in pairing.matches if record is not None}
    return found if pairing.is_certain and len(found) == len(pairing.matches) else {}
