"""The models and optimizers of a case, one or several, each with its name in the report and its key in the checkpoint.

Never looks at a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ckptmove.errors import CaseUnusable

if TYPE_CHECKING:
    from ckptmove.case import Case


class ModelPart(NamedTuple):
    """A model of a case.

    Attributes:
        name: what the report calls it: ``model``, or ``model['netG']`` of several.
        key: its key in the case; empty where the case has one model.
        part: path of its state_dict in the checkpoint, or of what that is in; None for whichever fits.
        module: the model.
    """

    name: str
    key: str
    part: str | None
    module: nn.Module

    @property
    def label(self) -> str:
        """The subject of a sentence about it: ``the model``, or its name."""
        return self.name if self.key else "the model"


class OptimizerPart(NamedTuple):
    """An optimizer of a case.

    Attributes:
        name: what the report calls it: ``optimizer``, or ``optimizer['optG']`` of several.
        key: its key in the case; empty where the case has one optimizer.
        part: path of its state_dict in the checkpoint, or of what that is in; None for whichever fits.
        optimizer: the optimizer.
    """

    name: str
    key: str
    part: str | None
    optimizer: torch.optim.Optimizer

    @property
    def label(self) -> str:
        """The subject of a sentence about it: ``the optimizer``, or its name."""
        return self.name if self.key else "the optimizer"

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


def require_usable(case: Case, typed: str) -> None:
    """Refuse a case whose fields are not what they are to be, or do not go together.

    Args:
        case: the case.
        typed: the name of the user's function.

    Raises:
        CaseUnusable: it is one.
    """
    model, optimizer = case.model, case.optimizer
    if not _is_made_of(model, nn.Module) or not _is_made_of(optimizer, torch.optim.Optimizer):
        kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise CaseUnusable(
            f"{typed}: model and optimizer are to be a Module and an Optimizer, or dicts of such by their keys in the "
            f"checkpoint, and are {kinds}"
        )
    for field, chosen, value in (("part", case.part, model), ("optimizer_part", case.optimizer_part, optimizer)):
        if chosen is not None and isinstance(value, Mapping):
            raise CaseUnusable(f"{typed}: {field} is for one of them: the keys of a dict choose already")
    if case.step is None and (isinstance(model, Mapping) or isinstance(optimizer, Mapping)):
        raise CaseUnusable(f"{typed}: a dict of models or optimizers needs a step(batch)")


def _is_made_of(value: object, kind: type) -> bool:
    """Whether something is of a kind, or a dict of such by text."""
    if not isinstance(value, Mapping):
        return isinstance(value, kind)
    return bool(value) and all(isinstance(key, str) and isinstance(one, kind) for key, one in value.items())


def by_key(values: Mapping[str, object]) -> object:
    """Evidence about each part by its key; of a case with one, about that one."""
    return values[""] if "" in values else dict(values)
