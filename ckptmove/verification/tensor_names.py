"""What a user calls a tensor: ``criterion.pos_weight``, ``batch['input_ids']``, ``model.layer1.running_mean``.

Never compares values: a tensor is found by its identity.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.case import Case

Kind: TypeAlias = Literal["model", "attribute", "criterion", "batch", "state"]


class NamedTensor(NamedTuple):
    """A tensor of a case.

    Attributes:
        name: path from the case, as it is written in Python.
        kind: ``model``: a parameter or a buffer; ``attribute``: of a module of the model, and neither of them;
            ``criterion``: of the loss; ``batch``: a leaf of it; ``state``: of the optimizer.
        tensor: the tensor.
        key: the attribute's name in its module, or the leaf's path in the batch.
    """

    name: str
    kind: Kind
    tensor: torch.Tensor
    key: str = ""


def names_of(case: Case) -> dict[int, NamedTensor]:
    """Every tensor of a case by identity; one that has several names has the first."""
    names: dict[int, NamedTensor] = {}
    for found in (*_of_model(case), *_of_criterion(case), *_of_batch(case), *_of_optimizer(case)):
        names.setdefault(id(found.tensor), found)
    return names


def leaves(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in tuples, lists and dicts, with the Python expression of the way there."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from leaves(one, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, one in enumerate(value):
            yield from leaves(one, f"{path}[{index}]")


def _of_model(case: Case) -> Iterator[NamedTensor]:
    for name, tensor in (*case.model.named_parameters(), *case.model.named_buffers()):
        yield NamedTensor(f"model.{name}", "model", tensor)
    yield from _attributes(case.model, "model", "attribute")


def _attributes(module: nn.Module, root: str, kind: Kind) -> Iterator[NamedTensor]:
    """Tensors that modules hold as plain attributes: `module.to` does not know them."""
    for path, one in module.named_modules(prefix=root):
        for key, value in vars(one).items():
            if not key.startswith("_"):
                for within, tensor in leaves(value, key):
                    yield NamedTensor(f"{path}.{within}", kind, tensor, within)


def _of_criterion(case: Case) -> Iterator[NamedTensor]:
    criterion: Any = case.criterion
    if isinstance(criterion, nn.Module):
        for name, tensor in (*criterion.named_parameters(), *criterion.named_buffers()):
            yield NamedTensor(f"criterion.{name}", "criterion", tensor)
        yield from _attributes(criterion, "criterion", "criterion")
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
    own = {id(parameter): name for name, parameter in case.model.named_parameters()}
    for number, group in enumerate(case.optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            name = own.get(id(parameter), f"param_groups[{number}]['params'][{index}]")
            if id(parameter) not in own:
                yield NamedTensor(f"optimizer.{name}", "state", parameter)
            for path, tensor in leaves(case.optimizer.state.get(parameter, {})):
                yield NamedTensor(f"optimizer.state[{name!r}]{path}", "state", tensor)
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                yield NamedTensor(f"optimizer.param_groups[{number}][{key!r}]", "state", value)
