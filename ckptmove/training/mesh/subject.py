"""The models and optimizers of a sharded case, and the state that is loaded into them."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from ckptmove.errors import CaseUnusable
from ckptmove.training.case.parts import models_of, optimizers_of
from ckptmove.training.mesh.trained_model import TrainedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckptmove.case import Case
    from ckptmove.training.mesh.stored import Region, Slice
    from ckptmove.training.mesh.trained_model import LiveTensor


class Subject:
    """The models of a case, each with its optimizer, as one.

    A pipeline with several stages on a rank has a model for each.

    Attributes:
        case: the case.
        models: the models.
        state: the state_dict to load, without objects that make their own.
        keys: names of its values, joined by dots as ``torch.distributed.checkpoint`` joins them.
        slices: elements that this rank has of flattened parameters, by the id of the parameter.
        parameters: parameters of the optimizers by their name in the checkpoint, in the order of these names.
    """

    def __init__(self, case: Case) -> None:
        if case.state is None:
            raise CaseUnusable("a case under torchrun needs state, the dict given to torch.distributed.checkpoint.save")
        self.case = case
        self._given = case.state
        self.state: dict[str, Any] = {
            key: value.state_dict() if isinstance(value, Stateful) else value for key, value in case.state.items()
        }
        self.keys = frozenset(flatten_state_dict(self.state)[0])
        self.models = [TrainedModel(model, optimizer, self.state) for model, optimizer in _pairs(case)]
        self.slices = {key: own for model in self.models for key, own in model.slices.items()}
        parameters = {key: one for model in self.models for key, one in model.parameters.items()}
        self.parameters = dict(sorted(parameters.items()))
        self._homes = {id(one): model for model in self.models for one in model.parameters.values()}

    @property
    def tied(self) -> list[frozenset[str]]:
        """Names in the state of the same parameter, for each parameter of a model that has several."""
        return [*chain.from_iterable(model.tied for model in self.models)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return [model.optimizer for model in self.models]

    @property
    def optimizer_name(self) -> str:
        """Names of the classes of the optimizers."""
        return ", ".join(dict.fromkeys(type(one).__name__ for one in self.optimizers))

    @property
    def mesh(self) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
        """Shape and dimension names of the mesh with most dimensions; None if nothing is sharded."""
        meshes = [*chain.from_iterable(model.meshes for model in self.models)]
        if not meshes:
            return None
        largest = max(meshes, key=lambda mesh: mesh.ndim)
        return tuple(largest.shape), tuple(largest.mesh_dim_names or ())

    def of(self, parameter: torch.Tensor) -> TrainedModel:
        """The model of a parameter."""
        return self._homes[id(parameter)]

    def groups(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """The groups of the optimizers, each with its parameters; with views in place of flat parameters."""
        return chain.from_iterable(model.groups() for model in self.models)

    def step(self) -> None:
        """Step the optimizers, and remove the gradients."""
        for one in self.optimizers:
            one.step()
            one.zero_grad()

    def tensors(self) -> Iterator[LiveTensor]:
        """All tensors of the models and of the optimizers' state."""
        return chain.from_iterable(model.tensors() for model in self.models)

    def model_tensors(self) -> Iterator[LiveTensor]:
        """All parameters and buffers of the models."""
        return chain.from_iterable(model.model_tensors() for model in self.models)

    def state_key(self, parameter: torch.Tensor, key: str) -> str:
        """Name in the checkpoint of a value of a parameter's state."""
        return self.of(parameter).state_key(parameter, key)

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in the state of a parameter, by state key."""
        return self.of(parameter).state_of(parameter)

    def place_of(self, parameter: torch.Tensor, value: torch.Tensor) -> Region | Slice:
        """The place of this rank's elements of a parameter, or of a tensor of its state."""
        return self.of(parameter).place_of(parameter, value)

    def shape_of(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Shape of a whole parameter."""
        own = self.slices.get(id(parameter))
        return tuple(parameter.shape) if own is None else own.shape

    def restore(self) -> None:
        """Give the loaded state to the objects of the user, and to the models and the optimizers."""
        for key, value in self._given.items():
            if isinstance(value, Stateful):
                value.load_state_dict(self.state[key])
        for model in self.models:
            if not self._is_own(model.model_path):
                model.restore_model(self.state)
            if model.optimizer_path is not None and not self._is_own(model.optimizer_path):
                model.restore_optimizer(self.state)

    def _is_own(self, path: tuple[Any, ...]) -> bool:
        """Whether a part of the state is loaded by an object of the user."""
        return bool(path) and isinstance(self._given[path[0]], Stateful)


def _pairs(case: Case) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """The models of a case, each with the optimizer of its parameters."""
    models, optimizers = models_of(case), optimizers_of(case)
    if len(models) == len(optimizers) == 1:
        yield models[0].module, optimizers[0].optimizer
        return
    for model in models:
        own = {id(one) for one in model.module.parameters()}
        found = [part for part in optimizers if not own.isdisjoint(map(id, part.parameters))]
        if len(found) != 1 or not own.issuperset(map(id, found[0].parameters)):
            raise CaseUnusable(f"{model.label} needs an optimizer of its own, with no parameters of other models")
        yield model.module, found[0].optimizer
