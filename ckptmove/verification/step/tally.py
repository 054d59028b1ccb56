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

    def is_idle(self, group: int) -> bool:
        """Whether a group has a learning rate of 0, be it a number or a tensor."""
        option = self.recipe.tensors[group].get("lr")
        if option is None:
            return self.recipe.groups[group].get("lr") == 0
        return all(self.source.tensor(record).item() == 0 for record in tensors_of(option))


@dataclass(slots=True)
class TrialTally:
    """What came of the steps so far, over all optimizers.

    Attributes:
        parameters: names of those that were stepped.
        elements: how many values were stepped.
        standins: parameters that the file does not hold.
        moved: parameters of which a value changed.
        stirred: parameters that did not move in any value, but whose moments did.
        untouched: parameters with a piece that neither moved nor changed a moment.
        idle: parameters whose group has a learning rate of 0.
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
        bare: why parameters have no state that could show in a step, with how many there are for each reason.
        with_state: parameters with state other than zero that the step reads.
        changed: those of them for which a step without it gave another result.
    """

    parameters: set[str] = field(default_factory=set)
    elements: int = 0
    standins: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    stirred: set[str] = field(default_factory=set)
    untouched: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    counted: int = 0
    counts: tuple[float, float] | None = None
    spoiled: set[str] = field(default_factory=set)
    casts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    faults: Offenders = field(default_factory=Offenders)
    error: str = ""
    unread: bool = False
    limit: str = ""
    unlike: str = ""
    unbegun: str = ""
    apart: Offenders = field(default_factory=Offenders)
    furthest: float = 0.0
    bare: dict[str, set[str]] = field(default_factory=dict)
    with_state: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
