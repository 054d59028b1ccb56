"""How an optimizer is tried, and what came of it.

Never makes a step and never judges one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.verification.checks import Offenders
from ckptmove.verification.step.entries import tensors_of

if TYPE_CHECKING:
    from ckptmove.model import OptimizerRecord
    from ckptmove.verification.pieces import TensorSource
    from ckptmove.verification.place import Place
    from ckptmove.verification.step.recipe import Recipe


class Trial(NamedTuple):
    """How one optimizer is tried.

    Attributes:
        optimizer: the optimizer.
        recipe: class and options of the step.
        reference: the same for the step that it is compared with.
        source: of parameters and state.
        second: of those of the step that it is compared with.
        place: where the step is made.
        other: where the step is made that it is compared with.
        exact: whether the two have to agree bit for bit.
    """

    optimizer: OptimizerRecord
    recipe: Recipe
    reference: Recipe
    source: TensorSource
    second: TensorSource
    place: Place
    other: Place
    exact: bool

    def has_zero_rate(self, group: int) -> bool:
        """Whether a group has a learning rate of 0, be it a number or a tensor."""
        option = self.recipe.tensors[group].get("lr")
        if option is None:
            return self.recipe.groups[group].get("lr") == 0
        return all(self.source.tensor(record).item() == 0 for record in tensors_of(option))


class Member(NamedTuple):
    """A parameter of one optimizer: two of them may train the same tensor.

    Attributes:
        optimizer: index among the optimizers that are stepped.
        name: of the parameter.
    """

    optimizer: int
    name: str


@dataclass(slots=True)
class TrialTally:
    """What came of the steps so far, over all optimizers.

    Attributes:
        trials: how each optimizer was tried; the last one is being stepped.
        parameters: those that were stepped.
        elements: how many values were stepped.
        standins: parameters that the file does not hold.
        moved: parameters of which a value changed.
        stirred: parameters that did not move in any value, but whose moments did.
        untouched: of a class of another library, parameters with a piece that neither moved nor changed a moment.
        idle: parameters whose group has a learning rate of 0, but those that moved and those that are untouched.
        counted: step counts that went up by one.
        counts: the lowest and the highest of them, after the step.
        spoiled: parameters that were not finite before the step either.
        casts: moments that ``load_state_dict`` gave another dtype, with both dtypes.
        faults: what is wrong with the step.
        error: what torch refused, with the parameter; empty where it did not.
        unread: whether that is not torch's doing: there are no bytes to step from.
        limit: why a class of another library cannot be stepped here, which is no fault of the file.
        unlike: why its two steps need not agree.
        unbegun: why it makes no step without the stored state.
        apart: where the two steps disagree.
        furthest: greatest difference between the two.
        bare: by reason, parameters without state that could show in a step.
        with_state: parameters with state other than zero that the step reads.
        changed: those of them for which a step without it gave another result.
    """

    trials: list[Trial] = field(default_factory=list)
    parameters: set[Member] = field(default_factory=set)
    elements: int = 0
    standins: set[Member] = field(default_factory=set)
    moved: set[Member] = field(default_factory=set)
    stirred: set[Member] = field(default_factory=set)
    untouched: set[Member] = field(default_factory=set)
    idle: set[Member] = field(default_factory=set)
    counted: int = 0
    counts: tuple[float, float] | None = None
    spoiled: set[Member] = field(default_factory=set)
    casts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    faults: Offenders = field(default_factory=Offenders)
    error: str = ""
    unread: bool = False
    limit: str = ""
    unlike: str = ""
    unbegun: str = ""
    apart: Offenders = field(default_factory=Offenders)
    furthest: float = 0.0
    bare: dict[str, set[Member]] = field(default_factory=dict)
    with_state: set[Member] = field(default_factory=set)
    changed: set[Member] = field(default_factory=set)

    def member(self, name: str) -> Member:
        """A parameter of the optimizer that is being stepped."""
        return Member(len(self.trials) - 1, name)

    def of(self, index: int) -> OptimizerTally:
        """What the steps of one optimizer showed of its stored state."""
        bare = {reason: {one for one in some if one.optimizer == index} for reason, some in self.bare.items()}
        return OptimizerTally(
            where=self.trials[index].optimizer.where or "the optimizer",
            is_foreign=self.trials[index].recipe.is_foreign,
            bare={reason: some for reason, some in bare.items() if some},
            with_state={one for one in self.with_state if one.optimizer == index},
            changed={one for one in self.changed if one.optimizer == index},
        )


class OptimizerTally(NamedTuple):
    """What the steps of one optimizer showed of its stored state.

    Attributes:
        where: its path.
        is_foreign: whether its class is of another library.
        bare: as of :class:`TrialTally`, and so are the others.
        with_state: parameters with state that the step reads.
        changed: those of them for which a step without it gave another result.
    """

    where: str
    is_foreign: bool
    bare: dict[str, set[Member]]
    with_state: set[Member]
    changed: set[Member]
