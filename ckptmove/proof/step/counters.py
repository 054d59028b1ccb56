"""Check the step counts of optimizers, and whether they agree with the moments of the same parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.proof.tensors.stored import distinct
from ckptmove.torch_facts.optimizers import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.model import Inventory, OptimizerRecord, StateEntry
    from ckptmove.proof.tensors.stored import StoredTensors


#: Lowest and highest value of scalars other than the count, by state key.
_BOUNDS: Final = {"mu_product": (0.0, 1.0), "mu": (0.0, 1.0), "eta": (0.0, math.inf)}


class Uneven(NamedTuple):
    """A group whose parameters have different step counts. Healthy if a layer was frozen for a time."""

    where: str  # path of the group
    low: float  # lowest count
    high: float  # highest count
    behind: tuple[str, ...]  # paths of the counts below the highest

    def __str__(self) -> str:
        return f"step counts from {self.low:g} to {self.high:g} in {self.where}"

    @property
    def advice(self) -> str:
        """The range with advice, for the one-line detail of a check."""
        first, more = self.behind[0], len(self.behind) - 1
        behind = f"{first} and {more:,} more were" if more else f"{first} was"
        return f"{self} (O209): nothing to do if {behind} frozen for a time; otherwise use another checkpoint"


@dataclass(slots=True)
class CounterFaults:
    """Faults in the step counts of a checkpoint."""

    negative: list[tuple[str, float]] = field(default_factory=list)  # paths and values of counts below zero
    #: paths of other counts and scalars that no training writes, each with its value and what is wrong with it.
    wrong: list[tuple[str, str]] = field(default_factory=list)
    uneven: list[Uneven] = field(default_factory=list)  # groups whose parameters have different counts


def check_counters(inventory: Inventory, stored: StoredTensors) -> CounterFaults:
    """Check every step count. Counts whose bytes cannot be read are left to the checks of the file."""
    counters = CounterFaults()
    for optimizer in inventory.optimizers:
        groups = {key: group for group in optimizer.groups for key in group.params}
        counts: dict[str, list[tuple[str, float]]] = {}
        for path, value in _out_of_bounds(optimizer, stored):
            counters.wrong.append((path, f"{value:g}, a value that {optimizer.algorithm} never writes"))
        for entry, path, count in _counts(optimizer, stored):
            if count < 0:
                counters.negative.append((path, count))
            elif optimizer.algorithm is not None:
                fault = _fault(optimizer.algorithm, entry, count, stored)
                if fault:
                    counters.wrong.append((path, f"{count:g}{fault}"))
            if entry.key in groups and count >= 0:
                counts.setdefault(groups[entry.key].where, []).append((path, count))
        for where, of_group in counts.items():
            low, high = min(count for _, count in of_group), max(count for _, count in of_group)
            if low < high:
                behind = tuple(path for path, count in of_group if count < high)
                counters.uneven.append(Uneven(where, low, high, behind))
    return counters


def _counts(optimizer: OptimizerRecord, stored: StoredTensors) -> Iterator[tuple[StateEntry, str, float]]:
    for entry in optimizer.state:
        record = entry.tensor("step")
        value = dict(entry.scalars).get("step")
        if record is not None and stored.place(record) is not None:
            # A tensor with several values is not a count.
            value = stored.tensor(record).item() if math.prod(record.shape) == 1 else math.nan
        if isinstance(value, (int, float)):
            yield entry, f"{optimizer.where}.state.{entry.key}.step".lstrip("."), as_float(value)


def as_float(value: float) -> float:
    """The value as a float; infinite if it is an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _out_of_bounds(optimizer: OptimizerRecord, stored: StoredTensors) -> Iterator[tuple[str, float]]:
    scalars = BY_NAME[optimizer.algorithm].scalars if optimizer.algorithm in BY_NAME else frozenset()
    for entry in optimizer.state:
        for key, record in entry.tensors:
            if key in scalars & _BOUNDS.keys() and not record.shape and stored.place(record) is not None:
                value = float(stored.tensor(record).item())
                if not _BOUNDS[key][0] <= value <= _BOUNDS[key][1]:
                    yield record.name, value


def _fault(algorithm: str, entry: StateEntry, count: float, stored: StoredTensors) -> str:
    """The fault of a count, as text that follows its value; empty if it has none."""
    if math.isinf(count):
        return ", larger than any number of steps"
    if not count.is_integer():
        return ", not a whole number of steps"
    if count:
        return ""
    row = BY_NAME[algorithm]
    for key, record in entry.tensors:
        begins_at_zero = key in row.known_state - row.scalars - row.nonzero_initial
        if begins_at_zero and stored.place(record) is not None and bool(distinct(stored.tensor(record)).any()):
            return f", but {key} of the same parameter is not zero: the count was lost"
    return ""
