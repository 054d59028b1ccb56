"""What one optimizer step changed, in the words that every check of a step uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.text import amount

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The fault of a step without any effect.
STILL: Final = "neither a parameter nor a moment changed"
#: The fault of a step that does not use the stored state.
UNUSED: Final = "a step without the stored state gives the same"


class Motion(NamedTuple):
    """Numbers of parameters that a step changed; under torchrun, of the shards of them that the ranks have."""

    stepped: int = 0  # number of them that were stepped
    moved: int = 0  # how many have another value
    changed: int = 0  # how many have another value or another moment
    below: int = 0  # how many have only another moment: the update is below the precision of the values
    idle: int = 0  # how many have a learning rate of 0, and no other value

    @classmethod
    def total(cls, motions: Iterable[Motion]) -> Motion:
        """The sum over several ranks."""
        return cls(*map(sum, zip(*motions, strict=True)))

    @property
    def is_still(self) -> bool:
        """Whether the step changed nothing, although a learning rate is not 0."""
        return self.stepped > self.idle and not self.changed

    def summary(self, noun: str, *, size: str = "", finite: str = "all finite", counts: str = "") -> str:
        """How many moved, with the number of values, which of them are finite, and what the step counts did."""
        return f"{self.moved:,} of {amount(self.stepped, noun)}{size} moved, {finite}{counts}"

    def remarks(self, noun: str) -> list[str]:
        """Why some did not move."""
        below = f"{amount(self.below, noun)} with an update below its precision"
        return [below] * bool(self.below) + [f"{amount(self.idle, noun)} with a learning rate of 0"] * bool(self.idle)


def not_finite(name: str) -> str:
    """The fault of values that a step made NaN or infinite."""
    return f"{name} is not finite after the step"


def miscounted(name: str, before: float, after: float) -> str:
    """The fault of a step count that did not rise by one; empty if it did."""
    return "" if after == before + 1 else f"{name} went from {before:g} to {after:g}"


def used(changed: int) -> str:
    """How many parameters show that the step uses the stored state."""
    return f"without the stored state the step gives another result for {amount(changed, 'parameter')}"
