"""Match an optimizer across checkpoints that key its parameters differently: by number, by name, flat, or reordered.

Parameters are matched only if the match is unambiguous.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.pairing import pair_all
from ckptmove.model import OPAQUE
from ckptmove.torch_facts.optimizers import DEVICE_FLAGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import OptimizerRecord, TensorRecord


class _Absent:
    """Placeholder for a value that one side lacks."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()


class RekeyedOptimizer(NamedTuple):
    """An optimizer whose keys, form or order of names differ between two checkpoints."""

    one: OptimizerRecord  # the optimizer in the first
    other: OptimizerRecord  # the optimizer in the second
    keys: Mapping[str, str]  # keys of its parameters in the first and the second; empty if none match

    @property
    def is_reordered(self) -> bool:
        """Whether only the order of its named parameters differs."""
        return _listed(self.one) != _listed(self.other) and _form(self.one) == _form(self.other)

    def tensors(self) -> Iterator[tuple[TensorRecord, TensorRecord]]:
        """Pairs of state tensors, parameter by parameter."""
        theirs = {entry.key: dict(entry.tensors) for entry in self.other.state}
        for entry in self.one.state:
            others = theirs.get(self.keys.get(entry.key, ""), {})
            yield from ((tensor, others[key]) for key, tensor in entry.tensors if key in others)

    def changes(self, *, flags_count: bool) -> Iterator[tuple[str, object, object]]:
        """Differences in groups, options and non-tensor state: the path and both values.

        A value that one side lacks is ``ABSENT``. An object of some class is ``OPAQUE`` and cannot be compared. Options
        that follow the device are compared if ``flags_count``.
        """
        if not self.keys:
            return
        reported: set[str] = set()
        for path, mine, theirs in (*self._groups(), *self._options(), *self._scalars()):
            is_flag = path.rpartition(".")[2] in DEVICE_FLAGS and not flags_count
            is_same = (type(mine), repr(mine)) == (type(theirs), repr(theirs)) and mine is not OPAQUE
            if path not in reported and not (is_same or is_flag):
                reported.add(path)
                yield path, mine, theirs

    def _groups(self) -> Iterator[tuple[str, object, object]]:
        """Differences in the parameters of each group; the flat form has no groups."""
        if self.one.is_flat or self.other.is_flat:
            return
        ours = sorted(sorted(self.keys[key] for key in group.params) for group in self.one.groups)
        theirs = sorted(sorted(group.params) for group in self.other.groups)
        if ours != theirs:
            sizes = [list(map(len, groups)) for groups in (ours, theirs)]
            mine = "groups with different parameters" if sizes[0] == sizes[1] else sizes[0]
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


def find_rekeyed(one: OpenCheckpoint, other: OpenCheckpoint) -> tuple[RekeyedOptimizer, ...]:
    """Optimizers with the same path in two checkpoints, whose keys, form or order of names differ.

    If both use the same keys, parameters are matched by key; otherwise by the name of their tensor in the model.
    The order of numbers counts: ``load_state_dict`` of an optimizer matches by position.
    """
    # Computed for all optimizers of a side at once, and only if needed.
    ours_paired, theirs_paired = (cache(partial(pair_all, side.inventory)) for side in (one, other))
    theirs = {record.where.removeprefix(other.top): at for at, record in enumerate(other.inventory.optimizers)}
    found = []
    for at, record in enumerate(one.inventory.optimizers):
        place = theirs.get(record.where.removeprefix(one.top))
        counterpart = None if place is None else other.inventory.optimizers[place]
        if (
            counterpart is None
            or place is None
            or (_form(record) == _form(counterpart) and not _differ_in_order(record, counterpart))
        ):
            continue
        keys = {key: key for key in _keys(record)}
        if _keys(record) != _keys(counterpart):
            ours, others = _by_tensor(one, ours_paired()[at]), _by_tensor(other, theirs_paired()[place])
            keys = {key: others[name] for name, key in ours.items()} if ours.keys() == others.keys() else {}
        found.append(RekeyedOptimizer(record, counterpart, keys))
    return tuple(found)


def _form(optimizer: OptimizerRecord) -> tuple[frozenset[str], bool]:
    return _keys(optimizer), optimizer.is_flat


def _differ_in_order(one: OptimizerRecord, other: OptimizerRecord) -> bool:
    """Whether optimizers with the same keys list names in another order; the flat form has no lists."""
    is_named = not any(key.isdigit() for key in _keys(one))
    return is_named and not one.is_flat and _listed(one) != _listed(other)


def _listed(optimizer: OptimizerRecord) -> list[tuple[str, ...]]:
    return [group.params for group in optimizer.groups]


def _keys(optimizer: OptimizerRecord) -> frozenset[str]:
    return frozenset(key for group in optimizer.groups for key in group.params)


def _by_tensor(side: OpenCheckpoint, pairing: Pairing) -> dict[str, str]:
    """Keys of an optimizer's parameters by tensor name; empty if the tensor of any parameter is unknown."""
    found = {record.name.removeprefix(side.top): key for key, record in pairing.matches if record is not None}
    return found if pairing.is_certain and len(found) == len(pairing.matches) else {}
