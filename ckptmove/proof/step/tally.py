"""The inputs and the accumulated results of an optimizer's trial steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckptmove.proof.checks import UNITED, First, Offenders, Tally
from ckptmove.proof.step.entries import tensors_of

if TYPE_CHECKING:
    from ckptmove.model import OptimizerRecord
    from ckptmove.proof.place import StepDevice
    from ckptmove.proof.step.recipe import Recipe
    from ckptmove.proof.tensors.pieces import ParameterPiece, TensorSource


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
    first: int  # index of its first parameter among those of all optimizers

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


def _widest(one: tuple[float, float] | None, other: tuple[float, float] | None) -> tuple[float, float] | None:
    """The range that contains two others."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


@dataclass(slots=True)
class TrialTally(Tally):
    """Results of the steps so far, over all optimizers."""

    _trials: list[Trial] = field(default_factory=list)  # inputs for each optimizer; the last one is being stepped
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
    #: lowest and highest of them after the step.
    counts: tuple[float, float] | None = field(default=None, metadata={"join": _widest})
    #: parameters that were not finite before the step either.
    not_finite_before: set[Member] = field(default_factory=set)
    #: moments that ``load_state_dict`` cast, with both dtypes.
    casts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    faults: Offenders = field(default_factory=Offenders)  # faults of the step
    error: First = field(default_factory=First)  # exceptions of the step, with the parameter
    unread_errors: set[str] = field(default_factory=set)  # those because bytes could not be read
    #: why optimizers were not stepped, by their index among those of the file.
    left_out: dict[int, str] = field(default_factory=dict, metadata=UNITED)
    incomparable: First = field(default_factory=First)  # why step and reference step need not agree
    fresh_failure: First = field(default_factory=First)  # why no step is made without the stored state
    apart: Offenders = field(default_factory=Offenders)  # differences between step and reference step
    furthest: float = field(default=0.0, metadata={"join": max})  # largest difference between them
    #: parameters without state that could show in a step, by reason.
    bare: dict[str, set[Member]] = field(default_factory=dict)
    with_state: set[Member] = field(default_factory=set)  # parameters with non-zero state that the step reads
    #: parameters in ``with_state`` for which a step without the state gave another result.
    changed: set[Member] = field(default_factory=set)

    @property
    def unread(self) -> bool:
        """Whether the error is that bytes could not be read."""
        return str(self.error) in self.unread_errors

    def add_error(self, text: str, *, is_unread: bool = False) -> None:
        """Add an exception of the step."""
        self.error.add(text)
        self.unread_errors.update([text] * is_unread)

    def begin(self, trial: Trial) -> None:
        """Add the results of another optimizer."""
        self._trials.append(trial)

    def set_parameter(self, piece: ParameterPiece) -> None:
        """Say that the faults that follow are those of a piece's parameter."""
        self.set_index(self._trials[-1].first + piece.position)

    def member(self, name: str) -> Member:
        """A parameter of the optimizer that is being stepped."""
        return Member(len(self._trials) - 1, name)

    def of(self, index: int) -> OptimizerTally:
        """Results of one optimizer."""
        bare = {reason: {one for one in some if one.optimizer == index} for reason, some in self.bare.items()}
        return OptimizerTally(
            where=self._trials[index].optimizer.where or "the optimizer",
            is_foreign=self._trials[index].recipe.is_foreign,
            bare={reason: some for reason, some in bare.items() if some},
            changed={one for one in self.changed if one.optimizer == index},
        )


class OptimizerTally(NamedTuple):
    """Results of one optimizer about the use of its stored state."""

    where: str  # its path
    is_foreign: bool  # whether its class is from another library
    bare: dict[str, set[Member]]  # parameters without state that could show in a step, by reason
    changed: set[Member]  # parameters with state for which a step without the state gave another result
