"""The inputs and the accumulated results of an optimizer's trial steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptmove.proof.checks import Offenders
from ckptmove.proof.step.entries import tensors_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.model import OptimizerRecord
    from ckptmove.proof.place import StepDevice
    from ckptmove.proof.step.recipe import Recipe
    from ckptmove.proof.tensors.pieces import TensorSource


class Trial(NamedTuple):
    """Inputs of the trial steps of one optimizer."""

    optimizer: OptimizerRecord
    recipe: Recipe  # class and options of the step
    reference: Recipe  # class and options of the reference step
    source: TensorSource  # source of parameters and state
    second: TensorSource  # source of parameters and state of the reference step
    place: StepDevice  # device of the step
    other: StepDevice  # device of the reference step
    exact: bool  # whether the two steps must agree bit for bit

    def has_zero_rate(self, group: int) -> bool:
        """Whether a group has a learning rate of 0, as a number or a tensor."""
        option = self.recipe.tensors[group].get("lr")
        if option is None:
            return self.recipe.groups[group].get("lr") == 0
        return all(self.source.tensor(record).item() == 0 for record in tensors_of(option))


class Member(NamedTuple):
    """A parameter of one optimizer; two optimizers may train the same tensor."""

    optimizer: int  # index among the optimizers that are stepped
    name: str  # name of the parameter


@dataclass(slots=True)
class TrialTally:
    """Results of the steps so far, over all optimizers."""

    trials: list[Trial] = field(default_factory=list)  # inputs for each optimizer; the last one is being stepped
    parameters: set[Member] = field(default_factory=set)  # parameters that were stepped
    elements: int = 0  # number of values that were stepped
    standins: set[Member] = field(default_factory=set)  # parameters that the file does not have; zeros were used
    moved: set[Member] = field(default_factory=set)  # parameters with a changed value
    #: parameters without a changed value but with a changed moment.
    state_moved: set[Member] = field(default_factory=set)
    #: parameters of another library's class with a piece whose values and moments did not change.
    untouched: set[Member] = field(default_factory=set)
    #: parameters whose group has a learning rate of 0, except those in ``moved`` or ``untouched``.
    idle: set[Member] = field(default_factory=set)
    counted: int = 0  # number of step counts that rose by one
    counts: tuple[float, float] | None = None  # lowest and highest of them after the step
    #: parameters that were not finite before the step either.
    not_finite_before: set[Member] = field(default_factory=set)
    #: moments that ``load_state_dict`` cast, with both dtypes.
    casts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    faults: Offenders = field(default_factory=Offenders)  # faults of the step
    error: str = ""  # exception of the step, with the parameter, or empty
    unread: bool = False  # whether the error is that bytes could not be read
    limit: str = ""  # why a class of another library cannot be stepped here, which is not a fault of the file
    incomparable: str = ""  # why its step and reference step need not agree
    fresh_failure: str = ""  # why it makes no step without the stored state
    apart: Offenders = field(default_factory=Offenders)  # differences between step and reference step
    furthest: float = 0.0  # largest difference between them
    #: parameters without state that could show in a step, by reason.
    bare: dict[str, set[Member]] = field(default_factory=dict)
    with_state: set[Member] = field(default_factory=set)  # parameters with non-zero state that the step reads
    #: parameters in ``with_state`` for which a step without the state gave another result.
    changed: set[Member] = field(default_factory=set)

    @property
    def _sets(self) -> dict[str, set[Member]]:
        return {name: value for name in self.__slots__ if isinstance(value := getattr(self, name), set)}

    @property
    def is_clean(self) -> bool:
        """Whether nothing in the steps so far ends them or fails a check."""
        return not (self.error or self.limit or self.incomparable or self.fresh_failure or self.faults or self.apart)

    def to_json(self) -> dict[str, Any]:
        """Convert the figures to JSON, for another process."""
        return {
            "is_clean": self.is_clean,
            "elements": self.elements,
            "counted": self.counted,
            "counts": self.counts,
            "furthest": self.furthest,
            "casts": [[*cast, count] for cast, count in self.casts.items()],
            "bare": {reason: sorted(members) for reason, members in self.bare.items()},
            **{name: sorted(members) for name, members in self._sets.items()},
        }

    def join(self, other: Mapping[str, Any]) -> None:
        """Add the figures of another process, from the result of :meth:`to_json`."""
        self.elements += other["elements"]
        self.counted += other["counted"]
        ranges = [one for one in (self.counts, other["counts"]) if one is not None]
        self.counts = (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None
        self.furthest = max(self.furthest, other["furthest"])
        for *cast, count in other["casts"]:
            key, before, after = cast
            self.casts[key, before, after] = self.casts.get((key, before, after), 0) + count
        for reason, members in other["bare"].items():
            self.bare.setdefault(reason, set()).update(Member(*one) for one in members)
        for name, members in self._sets.items():
            members.update(Member(*one) for one in other[name])

    def member(self, name: str) -> Member:
        """A parameter of the optimizer that is being stepped."""
        return Member(len(self.trials) - 1, name)

    def of(self, index: int) -> OptimizerTally:
        """Results of one optimizer."""
        bare = {reason: {one for one in some if one.optimizer == index} for reason, some in self.bare.items()}
        return OptimizerTally(
            where=self.trials[index].optimizer.where or "the optimizer",
            is_foreign=self.trials[index].recipe.is_foreign,
            bare={reason: some for reason, some in bare.items() if some},
            changed={one for one in self.changed if one.optimizer == index},
        )


class OptimizerTally(NamedTuple):
    """Results of one optimizer about the use of its stored state."""

    where: str  # its path
    is_foreign: bool  # whether its class is from another library
    bare: dict[str, set[Member]]  # parameters without state that could show in a step, by reason
    changed: set[Member]  # parameters with state for which a step without the state gave another result
