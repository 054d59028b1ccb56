"""The model and the optimizer of a sharded case, with the names of their tensors in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from ckptmove.errors import CaseUnusable
from ckptmove.verification.mesh.flat_parameters import slices_of
from ckptmove.verification.mesh.stored import local, region_of, shards_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.case import Case
    from ckptmove.verification.mesh.stored import Region, Slice

_STATE = "state."


class LiveTensor(NamedTuple):
    """A tensor of the model or of the optimizer's state, or a shard of it.

    Attributes:
        key: its name in the checkpoint.
        value: the elements of this rank.
        where: their place in the whole tensor.
    """

    key: str
    value: torch.Tensor
    where: Region | Slice


class Subject:
    """The model and the optimizer of a case, and the state that is loaded into them.

    Attributes:
        case: the case.
        model: its model.
        optimizer: its optimizer.
        state: the state_dict to load, without objects that make their own.
        keys: names of its values, joined by dots as ``torch.distributed.checkpoint`` joins them.
        slices: elements that this rank has of flattened parameters, by the id of the parameter.
        parameters: parameters of the optimizer by their name in the checkpoint, in the order of these names.
        optimizer_prefix: what precedes ``state.`` and ``param_groups.`` in the names of the optimizer; None if the
            state has no entry for it.
    """

    def __init__(self, case: Case) -> None:
        """Find the names.

        Raises:
            CaseUnusable: if the case has no state, no single model and optimizer, a model that is not supported, or if
                its state does not contain the model.
        """
        if case.state is None:
            raise CaseUnusable("a case under torchrun needs state, the dict given to torch.distributed.checkpoint.save")
        if isinstance(case.model, Mapping) or isinstance(case.optimizer, Mapping):
            raise CaseUnusable("a sharded case takes one model and one optimizer, not dicts of them")
        self.case, self.model, self.optimizer = case, case.model, case.optimizer
        self.slices = slices_of(self.model)
        self._given = case.state
        self.state: dict[str, Any] = {
            key: value.state_dict() if isinstance(value, Stateful) else value for key, value in case.state.items()
        }
        flat, paths = flatten_state_dict(self.state)
        self.keys = frozenset(flat)
        own = get_model_state_dict(self.model)
        self._model_prefix = _prefix(flat, own)
        self._model_path = paths[self._model_prefix + next(iter(own))][:-1]
        held = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        names = {id(one): _name(self.model, name) for name, one in self.model.named_parameters() if id(one) in held}
        self._names = names
        parameters = {self._model_prefix + names[id(one)]: one for one in self._stepped() if id(one) in names}
        self.parameters = dict(sorted(parameters.items()))
        self._stems, self.optimizer_prefix = self._find_state(flat)
        self._optimizer_path = next(
            (path[: self._depth(path)] for key, path in paths.items() if self._is_of_optimizer(key)), None
        )

    def _stepped(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _is_of_optimizer(self, key: str) -> bool:
        prefix = self.optimizer_prefix
        return prefix is not None and key.startswith((f"{prefix}{_STATE}", f"{prefix}param_groups."))

    def _depth(self, path: tuple[Any, ...]) -> int:
        """Number of the keys that lead to the optimizer's state_dict, in the path of one of its values."""
        prefix, depth, length = self.optimizer_prefix or "", 0, 0
        while length < len(prefix):
            length += len(str(path[depth])) + 1
            depth += 1
        return depth

    def _find_state(self, flat: Mapping[str, Any]) -> tuple[dict[int, str], str | None]:
        """Beginnings of the names of the state of each parameter, and of the whole optimizer."""
        by_name = {id(one): self._names[id(one)] for one in self.parameters.values()}
        by_index = {id(one): str(index) for index, one in enumerate(self._stepped())}
        for named in (by_name, by_index):
            ends = [f"{_STATE}{name}." for name in named.values()]
            found = {key[: key.find(ends[0])] for key in self.keys if ends[:1] and ends[0] in key}
            prefixes = sorted((prefix for prefix in found if not prefix or prefix.endswith(".")), key=len)
            if prefixes:
                return {one: f"{prefixes[0]}{_STATE}{name}." for one, name in named.items()}, prefixes[0]
        groups = sorted((key for key in self.keys if "param_groups." in key), key=len)
        where = next((key[: key.find("param_groups.")] for key in groups), None)
        listed = flat.get(f"{where}param_groups.0.params") or [""]
        named = by_index if isinstance(listed[0], int) else by_name
        return {one: f"{where or ''}{_STATE}{name}." for one, name in named.items()}, where

    def state_key(self, parameter: torch.Tensor, key: str) -> str:
        """Name in the checkpoint of a value of a parameter's state."""
        return f"{self._stems[id(parameter)]}{key}"

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in the state of a parameter, by state key."""
        found = self.optimizer.state.get(parameter, {})
        return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}

    def tensors(self) -> Iterator[LiveTensor]:
        """All tensors of the model and of the optimizer's state."""
        yield from self.model_tensors()
        for parameter in self.parameters.values():
            for key, value in self.state_of(parameter).items():
                yield LiveTensor(self.state_key(parameter, key), local(value), self.place_of(parameter, value))

    def model_tensors(self) -> Iterator[LiveTensor]:
        """All parameters and buffers of the model."""
        own = get_model_state_dict(self.model)
        for name, one in own.items():
            for region, mine in shards_of(one) if torch.is_tensor(one) else ():
                yield LiveTensor(self._model_prefix + name, mine, region)

    def place_of(self, parameter: torch.Tensor, value: torch.Tensor) -> Region | Slice:
        """The place of this rank's elements of a parameter, or of a tensor of its state."""
        own = self.slices.get(id(parameter))
        return region_of(value) if own is None or not value.dim() else own

    def shape_of(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Shape of a whole parameter."""
        own = self.slices.get(id(parameter))
        return tuple(parameter.shape) if own is None else own.shape

    def restore(self) -> None:
        """Give the loaded state to the objects of the user, and to the model and the optimizer."""
        for key, value in self._given.items():
            if isinstance(value, Stateful):
                value.load_state_dict(self.state[key])
        if not self._is_own(self._model_path):
            loaded = _at(self.state, self._model_path)
            if self._model_prefix == "".join(f"{key}." for key in self._model_path):
                set_model_state_dict(self.model, loaded)
            else:  # a state_dict() with the prefix of a wrapper
                self.model.load_state_dict(loaded)
        if self._optimizer_path is None or self._is_own(self._optimizer_path):
            return
        loaded = _at(self.state, self._optimizer_path)
        if any(stem.endswith(f"{_STATE}0.") for stem in self._stems.values()):
            self.optimizer.load_state_dict(loaded)
        else:
            is_flat = not isinstance(loaded.get("state"), Mapping)
            options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
            set_optimizer_state_dict(self.model, self.optimizer, loaded, options=options)

    def _is_own(self, path: tuple[Any, ...]) -> bool:
        """Whether a part of the state is loaded by an object of the user."""
        return bool(path) and isinstance(self._given[path[0]], Stateful)


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def _name(model: nn.Module, name: str) -> str:
    """Name of a parameter as ``get_state_dict`` has it, without the prefixes of wrappers."""
    (found,) = _get_fqns(model, name)
    return found


def _prefix(flat: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What precedes the names of the model in a flat state_dict.

    Raises:
        CaseUnusable: if the state does not contain all of them.
    """
    first = next(iter(own), "")
    found = sorted({key[: len(key) - len(first)] for key in flat if key.endswith(first)}, key=len)
    fitting = [one for one in found if all(one + name in flat for name in own)]
    live = [one for one in fitting if all(_is_same(flat[one + name], value) for name, value in own.items())]
    if not own or not fitting:
        raise CaseUnusable(f"its state has no state_dict of the model: no dict in it has all keys, such as {first!r}")
    return (live or fitting)[0]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values share memory, as an EMA of the model does not."""
    return len({_addresses(value) for value in (one, other)}) == 1


def _addresses(value: Any) -> tuple[int, ...]:
    return tuple(mine.data_ptr() for _, mine in shards_of(value)) if isinstance(value, torch.Tensor) else ()
