"""The models and optimizers of a case, with their names in the report and their keys in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from ckptmove.errors import CaseUnusable

if TYPE_CHECKING:
    from ckptmove.case import Case

#: Fields of a case for objects that take other parts of the checkpoint: one, or a dict by their keys in it.
OTHER_FIELDS: Final = ("scheduler", "scaler", "ema", "extra")


@dataclass(frozen=True, slots=True)
class _CasePart:
    """A model or an optimizer of a case."""

    name: str  # name in the report: `model`, or `model['netG']` if the case has several
    key: str  # key in the case; empty for a single one
    part: str | None  # path of its state_dict in the checkpoint, or of a parent; None for the one that fits

    @property
    def label(self) -> str:
        """Name in a sentence: ``the model``, or its name if the case has several."""
        return self.name if self.key else f"the {self.name}"


@dataclass(frozen=True, slots=True)
class ModelPart(_CasePart):
    """A model of a case."""

    module: nn.Module


@dataclass(frozen=True, slots=True)
class OptimizerPart(_CasePart):
    """An optimizer of a case."""

    optimizer: torch.optim.Optimizer

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Its parameters, in the order of its groups."""
        return [one for group in self.optimizer.param_groups for one in group["params"]]


def models_of(case: Case) -> tuple[ModelPart, ...]:
    """The models of a case."""
    if isinstance(case.model, Mapping):
        return tuple(ModelPart(f"model[{key!r}]", key, key, one) for key, one in case.model.items())
    return (ModelPart("model", "", case.part, case.model),)


def optimizers_of(case: Case) -> tuple[OptimizerPart, ...]:
    """The optimizers of a case."""
    if isinstance(case.optimizer, Mapping):
        return tuple(OptimizerPart(f"optimizer[{key!r}]", key, key, one) for key, one in case.optimizer.items())
    return (OptimizerPart("optimizer", "", case.optimizer_part, case.optimizer),)


def require_usable_case(case: Case, typed: str) -> None:
    """Check the types of a case's fields, and that they go together."""
    model, optimizer = case.model, case.optimizer
    if not _is_made_of(model, nn.Module) or not _is_made_of(optimizer, torch.optim.Optimizer):
        kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise CaseUnusable(
            f"{typed}: model and optimizer must be a Module and an Optimizer, or dicts of these by their keys in the "
            f"checkpoint, not {kinds}"
        )
    for field, chosen, value in (("part", case.part, model), ("optimizer_part", case.optimizer_part, optimizer)):
        if chosen is not None and isinstance(value, Mapping):
            raise CaseUnusable(f"{typed}: {field} cannot be used with a dict: its keys name the parts")
    for field in OTHER_FIELDS:
        chosen = getattr(case, field)
        if field == "extra" and not isinstance(chosen, (Mapping, NoneType)):
            raise CaseUnusable(f"{typed}: extra must be a dict of objects by their keys in the checkpoint")
        bare = [one for one in (chosen.values() if isinstance(chosen, Mapping) else (chosen,)) if not _loads(one)]
        if chosen is not None and bare:
            kind = type(bare[0]).__name__
            raise CaseUnusable(f"{typed}: {field} must have load_state_dict, or be a dict of such objects, not {kind}")
    if case.step is None and (isinstance(model, Mapping) or isinstance(optimizer, Mapping)):
        raise CaseUnusable(f"{typed}: a dict of models or optimizers needs a step(batch)")


def _loads(value: object) -> bool:
    return callable(getattr(value, "load_state_dict", None))


def _is_made_of(value: object, kind: type) -> bool:
    """Whether a value is of a class, or a dict from strings to values of the class."""
    if not isinstance(value, Mapping):
        return isinstance(value, kind)
    return bool(value) and all(isinstance(key, str) and isinstance(one, kind) for key, one in value.items())


def by_key(values: Mapping[str, object]) -> object:
    """Evidence for each part by its key; for a single part the value itself."""
    return values[""] if "" in values else dict(values)
