"""Choose the class to step a checkpoint's optimizer with, and validate ``--optimizer``.

The class is imported only in the child process, so this module needs no torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.errors import UsageError
from ckptmove.proof.step.entries import foreign_kind
from ckptmove.text import Argument
from ckptmove.torch_facts.optimizers import BY_NAME, is_fused_adam

if TYPE_CHECKING:
    from ckptmove.model import OptimizerRecord, ParamGroup

#: ``pkg.mod:CLASS``, a class of another library.
_ELSEWHERE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class Choice(NamedTuple):
    """The class to step an optimizer with, or why it is not stepped."""

    name: str = ""  # class in `torch.optim`, or another as `pkg.mod:CLASS`; empty if it is not stepped
    reason: str = ""  # why it is not stepped, or empty
    note: str = ""  # the assumption made, and whether it matters; empty if none was made


def choose_optimizer(optimizer: OptimizerRecord, override: str | None) -> Choice:
    """Choose the class to step an optimizer with."""
    if optimizer.obstacle:
        return Choice(reason=optimizer.obstacle)
    name = override.removeprefix("torch.optim:") if override else optimizer.algorithm
    if name is None:
        named = Argument("optimizer", "pkg.mod:CLASS")
        return Choice(reason=f"its keys match no class in torch.optim; name its class with {named}")
    if name not in BY_NAME:
        foreign = next((found for entry in optimizer.state if (found := foreign_kind(entry.without_inner()))), "")
        return Choice(reason=f"{name} keeps state that cannot be rebuilt: {foreign}") if foreign else Choice(name=name)
    return Choice(name=name, note="" if override else _assumption(name, optimizer))


def check_override(name: str | None) -> None:
    """Validate ``--optimizer``."""
    if name is None or name.removeprefix("torch.optim:") in BY_NAME or _ELSEWHERE.fullmatch(name):
        return
    meant = next((known for known in BY_NAME if known.lower() == name.lower()), None)
    module, _, last = name.rpartition(".")
    if meant is None and _ELSEWHERE.fullmatch(f"{module}:{last}"):
        meant = f"{module}:{last}"
    hint = f"did you mean {meant}?" if meant else f"known: {', '.join(sorted(BY_NAME))}; others as pkg.mod:CLASS"
    raise UsageError(f"'{name}' is not a class of torch.optim; {hint}")


def uses_state(name: str, group: ParamGroup) -> bool:
    """Whether a step with the group's options reads state; SGD without momentum does not."""
    return name != "SGD" or bool(dict(group.options).get("momentum"))


def _assumption(name: str, optimizer: OptimizerRecord) -> str:
    others = [other for other in optimizer.candidates if other != name]
    if not others:
        return ""
    decays = any(dict(group.options).get("weight_decay") for group in optimizer.groups)
    assumed = f"{name} was assumed"
    if all(is_fused_adam(group) for group in optimizer.groups):
        assumed += ", the default of FusedAdam, which does not save adam_w_mode"
    if not decays:
        return f"{assumed}; {others[0]} writes the same keys, and without weight decay the same step"
    return (
        f"{assumed}; {others[0]} writes the same keys and takes the same state, but applies weight_decay "
        f"differently: use {Argument('optimizer', others[0])} if that was used in training"
    )
