"""Names of the tensors of a case: ``criterion.pos_weight``, ``batch['input_ids']``, ``model.layer1.running_mean``.

Tensors are compared by identity.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn

from ckptmove.training.case.parts import models_of, optimizers_of
from ckptmove.training.code.containers import MAPPINGS, attributes_of, ways

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.case import Case

Kind: TypeAlias = Literal["model", "attribute", "criterion", "batch", "state"]

#: Attributes that every module has.
OF_MODULES: Final = frozenset(nn.Module().__dict__)


class NamedTensor(NamedTuple):
    """A tensor of a case."""

    name: str  # Python expression, from the fields of the case
    #: ``model``: a parameter or buffer; ``attribute``: a plain attribute of a module; ``criterion``: of the loss;
    #: ``batch``: of the batch; ``state``: of the optimizer.
    kind: Kind
    tensor: torch.Tensor
    key: str = ""  # name of the attribute, or path in the batch
    holder: object = None  # the module with the attribute, or the loss
    held: object = None  # value of the attribute: the tensor, or a container of it
    model: str = ""  # key of the model that it belongs to; empty if the case has a single model
    #: key of the optimizer that it belongs to, or that steps its model; empty for a single optimizer.
    optimizer: str = ""


def names_of(case: Case) -> dict[int, NamedTensor]:
    """Every tensor of a case by identity, with the first of its names."""
    names: dict[int, NamedTensor] = {}
    for found in (*_of_model(case), *_of_criterion(case), *_of_batch(case), *_of_optimizer(case)):
        names.setdefault(id(found.tensor), found)
    return names


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested tuples, lists and dicts, each with its Python expression."""
    return ((way, one) for way, one in parts(value, path) if isinstance(one, torch.Tensor))


def parts(
    value: object, path: str = "", mappings: tuple[type, ...] = MAPPINGS, around: tuple[int, ...] = ()
) -> Iterator[tuple[str, object]]:
    """The leaves of nested tuples, lists and mappings, each with its Python expression; a cycle ends there."""
    if not isinstance(value, (*mappings, tuple, list)):
        yield path, value
    elif id(value) not in around:
        items: Any = enumerate(value) if isinstance(value, (tuple, list)) else cast("Any", value).items()
        for key, one in items:
            yield from parts(one, f"{path}[{key!r}]", mappings, (*around, id(value)))


def _of_model(case: Case) -> Iterator[NamedTensor]:
    owners = {id(one): part.key for part in optimizers_of(case) for one in part.parameters}
    for part in models_of(case):
        own = [*part.module.named_parameters()]
        optimizer = next((owners[id(one)] for _, one in own if id(one) in owners), "")
        named = (NamedTensor(f"{part.name}.{name}", "model", one) for name, one in (*own, *part.module.named_buffers()))
        for found in (*named, *_attributes(part.module, part.name)):
            yield found._replace(model=part.key, optimizer=optimizer)


def _attributes(module: nn.Module, root: str) -> Iterator[NamedTensor]:
    """Tensors in plain attributes of modules, or of modules in plain lists: ``module.to`` does not move them."""
    seen = set(module.modules())
    for path, one, key, value in _plain(module, root):
        for within, tensor in _unregistered(value, path, seen):
            yield NamedTensor(within, "attribute", tensor, key, one, value)


def _plain(module: nn.Module, root: str) -> Iterator[tuple[str, nn.Module, str, object]]:
    """Plain attributes of a module and its submodules: expression, module, name, value."""
    for path, one in module.named_modules(prefix=root):
        for key, value in vars(one).items():
            if key not in OF_MODULES:
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
        for path, tensor in tensors_in(criterion.keywords, "criterion.keywords"):
            yield NamedTensor(path, "criterion", tensor)
    elif criterion is not None:
        for key, value in attributes_of(criterion).items():
            for path, tensor in tensors_in(value, f"criterion.{key}"):
                yield NamedTensor(path, "criterion", tensor)


def _of_batch(case: Case) -> Iterator[NamedTensor]:
    for path, one in ways("batch", case.batch, (Mapping,)):
        if isinstance(one, torch.Tensor):
            yield NamedTensor(path, "batch", one, path.removeprefix("batch"))


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
                for path, tensor in tensors_in(part.optimizer.state.get(parameter, {})):
                    state = f"{part.name}.state[{name!r}]{path}"
                    yield NamedTensor(state, "state", tensor, model=model, optimizer=part.key)
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    option = f"{part.name}.param_groups[{number}][{key!r}]"
                    yield NamedTensor(option, "state", value, optimizer=part.key)
