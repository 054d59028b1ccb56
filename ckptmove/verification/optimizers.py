"""Which class of ``torch.optim`` a checkpoint's optimizer is stepped with, and which ones can be stepped at all.

Never imports torch: the class is looked up where the step is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ckptmove.errors import UsageError
from ckptmove.optimizers import BY_NAME

if TYPE_CHECKING:
    from ckptmove.model import OptimizerRecord, ParamGroup

#: Their step cannot be tried without the model.
NOT_STEPPED: Final[dict[str, str]] = {
    "LBFGS": "a step of LBFGS evaluates the model again and again",
    "SparseAdam": "SparseAdam steps on sparse gradients, which only the model can make",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The class that an optimizer is stepped with, or why it is not stepped.

    Attributes:
        name: class in ``torch.optim``; empty where none is stepped.
        reason: why none is stepped; empty where one is.
        note: what was assumed, and whether that matters; empty where nothing had to be.
    """

    name: str = ""
    reason: str = ""
    note: str = ""


def choose(optimizer: OptimizerRecord, override: str | None) -> Choice:
    """The class to step an optimizer with.

    Args:
        optimizer: the optimizer.
        override: the class that the user named, or None.
    """
    name = override or optimizer.algorithm
    if name is None:
        return Choice(reason="its keys are those of no class in torch.optim; name one with --optimizer")
    if name in NOT_STEPPED:
        return Choice(reason=NOT_STEPPED[name])
    return Choice(name=name, note="" if override else _assumption(name, optimizer))


def check_override(name: str | None) -> None:
    """Refuse a class that cannot be stepped, before any work is done.

    Raises:
        UsageError: ``--optimizer`` names no class of ``torch.optim`` that is known here.
    """
    if name is None or name in BY_NAME:
        return
    meant = next((known for known in BY_NAME if known.lower() == name.lower()), None)
    hint = f"did you mean {meant}?" if meant else f"known are {', '.join(sorted(BY_NAME))}"
    raise UsageError(f"'{name}' is not a class of torch.optim; {hint}")


def uses_state(name: str, group: ParamGroup) -> bool:
    """Whether a step with a group's options reads any state: SGD without momentum does not."""
    return name != "SGD" or bool(dict(group.options).get("momentum"))


def _assumption(name: str, optimizer: OptimizerRecord) -> str:
    others = [other for other in optimizer.candidates if other != name]
    if not others:
        return ""
    decays = any(dict(group.options).get("weight_decay") for group in optimizer.groups)
    if not decays:
        return f"{name} was assumed; {others[0]} writes the same keys, and without weight decay the same step"
    return (
        f"{name} was assumed; {others[0]} writes the same keys and takes the same state, but applies weight_decay "
        f"differently: --optimizer {others[0]} if that one was trained with"
    )
