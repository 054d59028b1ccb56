"""What a user calls a tensor: ``criterion.pos_weight``, ``batch['input_ids']``, ``model.layer1.running_mean``.

Never compares values: a tensor is found by its identity.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from ckptmove.verification.case.parts import models_of, optimizers_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.case import Case

Kind: TypeAlias = Literal["model", "attribute", "criterion", "batch", "state"]

#: What every module keeps for itself.
_OF_MODULES: Final = frozenset(nn.Module().__dict__)


class NamedTensor(NamedTuple):
    """A tensor of a case.

    Attributes:
        name: path from the case, as it is written in Python.
        kind: ``model``: a parameter or a buffer; ``attribute``: of a module of the model, and neither of them;
            ``criterion``: of the loss; ``batch``: a leaf of it; ``state``: of the optimizer.
        tensor: the tensor.
        key: the attribute's name in its module, or the leaf's path in the batch.
        holder: the module that has the attribute, or the loss.
        held: the attribute's value: the tensor, or what it lies in.
        model: of several models in the case, the key of the one that it is of, or that has its parameter; else empty.
        optimizer: of several optimizers, the key of the one that it is of, or that steps its model; else empty.
    """

    name: str
    kind: Kind
    tensor: torch.Tensor
    key: str = ""
    holder: object = None
    held: object = None
    model: str = ""
    optimizer: str = ""


def names_of(case: Case) -> dict[int, NamedTensor]:
    """Every tensor of a case by identity; one that has several names has the first."""
    names: dict[int, NamedTensor] = {}
    for found in (*_of_model(case), *_of_criterion(case), *_of_batch(case), *_of_optimizer(case)):
        names.setdefault(id(found.tensor), found)
    return names


def leaves(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in tuples, lists and dicts, with the Python expression of the way there."""
    return ((way, one) for way, one in parts(value, path) if isinstance(one, torch.Tensor))


def parts(value: object, path: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, object]]:
    """What tuples, lists and dicts hold that is none of them, with the way there; what holds itself is left there."""
    if not isinstance(value, (Mapping, tuple, list)):
        yield path, value
    elif id(value) not in around:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in items:
            yield from parts(one, f"{path}[{key!r}]", (*around, id(value)))


def _of_model(case: Case) -> Iterator[NamedTensor]:
    owners = {id(one): part.key for part in optimizers_of(case) for one in part.parameters}
    for part in models_of(case):
        own = [*part.module.named_parameters()]
        optimizer = next((owners[id(one)] for _, one in own if id(one) in owners), "")
        named = (NamedTensor(f"{part.name}.{name}", "model", one) for name, one in (*own, *part.module.named_buffers()))
        for found in (*named, *_attributes(part.module, part.name)):
            yield found._replace(model=part.key, optimizer=optimizer)


def _attributes(module: nn.Module, root: str) -> Iterator[NamedTensor]:
    """Tensors that modules hold as plain attributes, or in modules in plain lists: `module.to` does not know them."""
    seen = set(module.modules())
    for path, one, key, value in _plain(module, root):
        for within, tensor in _unregistered(value, path, seen):
            yield NamedTensor(within, "attribute", tensor, key, one, value)


def _plain(module: nn.Module, root: str) -> Iterator[tuple[str, nn.Module, str, object]]:
    """What the user has set on a module and those in it: the way there, the module, the attribute, and its value."""
    for path, one in module.named_modules(prefix=root):
        for key, value in vars(one).items():
            if key not in _OF_MODULES:
                yield f"{path}.{key}", one, key, value


def _unregistered(value: object, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for within, part in parts(value, path):
        if isinstance(part, torch.Tensor):
            yield within, part
        elif isinstance(part, nn.Module) and part not in seen:
            for name, one in (*part.named_parameters(), *part.named_buffers()):
                yield f"{within}.{name}", one
            seen.update(part.modules())
            for below, _, _, held in _plain(part, within):
                yield from _unregistered(held, below, seen)


def _of_criterion(case: Case) -> Iterator[NamedTensor]:
    criterion: Any = case.criterion
    if isinstance(criterion, nn.Module):
        for name, tensor in (*criterion.named_parameters(), *criterion.named_buffers()):
            yield NamedTensor(f"criterion.{name}", "criterion", tensor, holder=criterion)
        yield from _attributes(criterion, "criterion")
    elif isinstance(criterion, functools.partial):
        for path, tensor in leaves(criterion.keywords, "criterion.keywords"):
            yield NamedTensor(path, "criterion", tensor)
    elif criterion is not None:
        for key, value in getattr(criterion, "__dict__", {}).items():
            for path, tensor in leaves(value, f"criterion.{key}"):
                yield NamedTensor(path, "criterion", tensor)


def _of_batch(case: Case) -> Iterator[NamedTensor]:
    for path, tensor in leaves(case.batch):
        yield NamedTensor(f"batch{path}", "batch", tensor, path)


def _of_optimizer(case: Case) -> Iterator[NamedTensor]:
    own = {
        id(one): (f"{model.key}.{name}".lstrip("."), model.key)
        for model in models_of(case)
        for name, one in model.module.named_parameters()
    }
    for part in optimizers_of(case):
        for number, group in enumerate(part.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name, model = own.get(id(parameter), (f"param_groups[{number}]['params'][{index}]", ""))
                if id(parameter) not in own:
                    yield NamedTensor(f"{part.name}.{name}", "state", parameter, optimizer=part.key)
                for path, tensor in leaves(part.optimizer.state.get(parameter, {})):
                    state = f"{part.name}.state[{name!r}]{path}"
                    yield NamedTensor(state, "state", tensor, model=model, optimizer=part.key)
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    option = f"{part.name}.param_groups[{number}][{key!r}]"
                    yield NamedTensor(option, "state", value, optimizer=part.key)
