"""The values of a comparison: where two checkpoints differ.

Never opens a checkpoint: ``comparison`` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ckptmove.model import OneLine

What: TypeAlias = Literal["device", "dtype", "shape", "value", "role", "object"]


class Criteria(NamedTuple):
    """What counts as a difference of two checkpoints.

    Attributes:
        devices: whether devices count, and what ``convert`` changes with them: group flags, ``torch.device`` objects,
            and dtypes that the target lacks. Roles count with them.
        values_of: names of the tensors of the first checkpoint whose values are compared; None for all.
    """

    devices: bool = True
    values_of: frozenset[str] | None = None


class LoneNan(NamedTuple):
    """Elements that are NaN on one side alone, which no figure tells of; NaN on both sides is no difference of values.

    Attributes:
        first: how many are in the first tensor alone.
        second: how many are in the second alone.
        elements: how many elements were compared.
        max_abs: the largest absolute difference of the others; 0 where there are none.
        max_rel: likewise, over the larger magnitude of the two.
    """

    first: int
    second: int
    elements: int
    max_abs: float | int
    max_rel: float


class Gap(NamedTuple):
    """How far the values of two tensors lie apart; NaN on one side alone, and unequal infinities, are infinitely far.

    Attributes:
        max_abs: the largest absolute difference of two elements; of integers that a float64 does not have, exactly.
        max_rel: the largest difference of two elements over the larger magnitude of the two: 0 to 2, or infinite (also
            where the difference is, as of 1.7e308 and -1.7e308).
        lone_nan: what of it is NaN on one side alone; None where nothing is.
    """

    max_abs: float | int
    max_rel: float
    lone_nan: LoneNan | None = None

    def repeated(self, times: int) -> Gap:
        """The same of elements of which each stands so many times."""
        if self.lone_nan is None:
            return self
        first, second, elements, *rest = self.lone_nan
        return self._replace(lone_nan=LoneNan(first * times, second * times, elements * times, *rest))


class Change(NamedTuple):
    """Something that both checkpoints have, and not alike.

    Attributes:
        name: of the tensor, or path of what is none.
        what: which of its properties; ``object`` for what is no tensor, and for the kind of one.
        source: how it is in the first; for a ``value`` its shape.
        target: how it is in the second.
        gap: of a ``value``, how far the two lie apart; None where that was not measured.
    """

    name: str
    what: What
    source: str
    target: str
    gap: Gap | None = None


class Uncompared(NamedTuple):
    """Something in both checkpoints that could not be compared: the values of a tensor, as a rule.

    Attributes:
        name: of the tensor, or of the object.
        reason: why.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DiffResult(OneLine):
    """What a comparison found.

    Attributes:
        first: path of the first checkpoint.
        second: path of the second.
        tensors: how many tensors both of them have.
        added: names of the tensors that only the second has.
        removed: names of those that only the first has.
        changed: what differs otherwise, in the order of the first.
        uncompared: tensors that may differ.
        notes: what was compared in another way than it lies, or left out, for people; none of it makes a difference.
    """

    first: str
    second: str
    tensors: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[Change, ...]
    uncompared: tuple[Uncompared, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs, and nothing was left uncompared."""
        return not (self.added or self.removed or self.changed or self.uncompared)

    def __str__(self) -> str:
        """Whether they are the same, in one line."""
        counts = f"{len(self.added)} added, {len(self.removed)} removed, {len(self.changed)} changed"
        return f"{self.first} and {self.second}: {'the same' if self.same else counts}"
