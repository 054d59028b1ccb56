"""Results of a comparison: the differences between two checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ckptmove.model import OneLine

What: TypeAlias = Literal["device", "dtype", "shape", "value", "role", "object"]


class LoneNan(NamedTuple):
    """Elements that are NaN on one side only. NaN on both sides is not a difference of values."""

    first: int  # number of elements that are NaN in the first tensor only
    second: int  # number of elements that are NaN in the second only
    elements: int  # number of elements compared
    max_abs: float | int  # the largest absolute difference of all other elements; 0 without any
    max_rel: float  # likewise, divided by the larger magnitude of the two


class Gap(NamedTuple):
    """Distance between the values of two tensors: infinite for NaN on one side only, and for unequal infinities."""

    max_abs: float | int  # largest absolute difference; exact for integers that float64 cannot represent
    #: the largest difference of two elements, divided by the larger magnitude of the two: 0 to 2, or infinite. It is
    #: also infinite if the difference overflows, as for 1.7e308 and -1.7e308.
    max_rel: float
    lone_nan: LoneNan | None = None  # elements that are NaN on one side only; None without any

    def repeated(self, times: int) -> Gap:
        """The gap of tensors in which each element occurs ``times`` times."""
        if self.lone_nan is None:
            return self
        first, second, elements, *rest = self.lone_nan
        return self._replace(lone_nan=LoneNan(first * times, second * times, elements * times, *rest))


class Change(NamedTuple):
    """A difference between two checkpoints, other than a tensor that only one of them has."""

    name: str  # name of the tensor, or path of the object or file
    what: What  # the property that differs; `object` for anything other than a tensor, and for the kind of a tensor
    source: str  # the property in the first checkpoint; for a `value`, the shape
    target: str  # the property in the second, likewise
    gap: Gap | None = None  # for a `value`, the distance between the two; None if it was not measured


class Uncompared(NamedTuple):
    """A tensor or an object that could not be compared; usually the values of a tensor."""

    name: str  # name of the tensor or of the object
    reason: str  # why it could not be compared


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Differences(OneLine):
    """Result of a comparison."""

    first: str  # path of the first checkpoint
    second: str  # path of the second
    tensors: int  # number of tensors that both of them have
    added: tuple[str, ...]  # names of tensors that only the second has
    removed: tuple[str, ...]  # names of tensors that only the first has
    changed: tuple[Change, ...]  # all other differences: those of tensors in the order of the first, then all others
    uncompared: tuple[Uncompared, ...]  # tensors and objects that may differ
    notes: tuple[str, ...] = ()  # anything left out or not compared as stored: these are no differences

    @property
    def same(self) -> bool:
        """Whether nothing differs, and nothing was left uncompared."""
        return not (self.added or self.removed or self.changed or self.uncompared)

    def __str__(self) -> str:
        counts = f"{len(self.added)} added, {len(self.removed)} removed, {len(self.changed)} changed"
        counts += f", {len(self.uncompared)} not compared" if self.uncompared else ""
        return f"{self.first} and {self.second}: {'the same' if self.same else counts}"
