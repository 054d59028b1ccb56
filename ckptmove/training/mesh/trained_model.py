"""A model and its optimizer in a sharded case, with the names of their tensors in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _get_fqns,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from ckptmove.errors import CaseUnusable
from ckptmove.training.mesh.flat_parameters import flat_parameters
from ckptmove.training.mesh.stored import is_sharded, local, region_of, shards_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from ckptmove.training.mesh.stored import Region, Slice

_STATE = "state."


class LiveTensor(NamedTuple):
    """A tensor of the model or of the optimizer's state, or a shard of it."""

    key: str  # its name in the checkpoint
    value: torch.Tensor  # the elements of this rank
    where: Region | Slice  # their place in the whole tensor


class TrainedModel:
    """A model with its optimizer.

    Attributes:
        optimizer: the optimizer.
        slices: elements that this rank has of flattened parameters, by the id of the parameter.
        parameters: parameters of the optimizer by their name in the checkpoint. If the optimizer has flat parameters,
            these are views of them.
        optimizer_prefix: what precedes ``state.`` and ``param_groups.`` in the names of the optimizer; None if the
            state has no entry for it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Find the names.

        Args:
            state: the state_dict of the case, without objects that make their own.
        """
        self._model, self.optimizer = model, optimizer
        self.slices, self._views = flat_parameters(model)
        self._flat = {id(view.values): view for own in self._views.values() for view in own}
        flat, paths = flatten_state_dict(dict(state))
        self._own = get_model_state_dict(model)
        self._model_prefix = _prefix(flat, self._own)
        #: Whether the state has whole tensors of a sharded model.
        self._is_full = any(
            is_sharded(one) and not is_sharded(flat[self._model_prefix + key]) for key, one in self._own.items()
        )
        self.model_path = paths[self._model_prefix + next(iter(self._own))][:-1]
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        stepped = ((name, one) for name, one in model.named_parameters() if id(one) in held)
        self._names = names = {key: own for pair in stepped for key, own in self._names_of(*pair).items()}
        self.parameters = {self._model_prefix + names[id(one)]: one for one in self._stepped() if id(one) in names}
        self._stems, self.optimizer_prefix = self._find_state(flat)
        self.optimizer_path = next(
            (path[: self._depth(path)] for key, path in paths.items() if self._is_of_optimizer(key)), None
        )

    @property
    def tied(self) -> list[frozenset[str]]:
        """Names in the checkpoint of the same parameter, for each parameter of the model that has several."""
        names: dict[int, set[str]] = {}
        for name, one in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(one), set()).update(self._model_prefix + own for own in _get_fqns(self._model, name))
        return [frozenset(own) for own in names.values() if len(own) > 1]

    @property
    def meshes(self) -> list[DeviceMesh]:
        """The meshes of its parameters."""
        return [one.device_mesh for one in self._model.parameters() if isinstance(one, DTensor)]

    def groups(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        """The groups of the optimizer, each with its parameters; with views in place of flat parameters."""
        for group in self.optimizer.param_groups:
            own: list[torch.Tensor] = []
            for one in group["params"]:
                own += [view.values for view in self._views[id(one)]] if id(one) in self._views else [one]
            yield group, own

    def _stepped(self) -> Iterator[torch.Tensor]:
        for _, own in self.groups():
            yield from own

    def _names_of(self, name: str, parameter: torch.Tensor) -> dict[int, str]:
        """Names of a parameter, or of those in a flat one, as ``get_state_dict`` has them, without wrappers."""
        views, found = self._views.get(id(parameter)), _get_fqns(self._model, name)
        if views is None:
            (own,) = found
            return {id(parameter): own}
        shortest = min((view.name for view in views), key=len)
        prefix = min(found, key=len).removesuffix(shortest)
        return {id(view.values): prefix + view.name for view in views}

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
            found = {key[: key.find(ends[0])] for key in flat if ends[:1] and ends[0] in key}
            prefixes = sorted((prefix for prefix in found if not prefix or prefix.endswith(".")), key=len)
            if prefixes:
                live = [prefix for prefix in prefixes if self._has_live_state(flat, f"{prefix}{ends[0]}")]
                prefix = (live or prefixes)[0]
                return {one: f"{prefix}{_STATE}{name}." for one, name in named.items()}, prefix
        groups = sorted((key for key in flat if "param_groups." in key), key=len)
        where = next((key[: key.find("param_groups.")] for key in groups), None)
        listed = flat.get(f"{where}param_groups.0.params") or [""]
        named = by_index if isinstance(listed[0], int) else by_name
        return {one: f"{where or ''}{_STATE}{name}." for one, name in named.items()}, where

    def _has_live_state(self, flat: Mapping[str, Any], stem: str) -> bool:
        """Whether values in a flat state_dict are the state of the first parameter."""
        state = self.state_of(next(iter(self.parameters.values())))
        return any(_is_same(flat.get(stem + key), value) for key, value in state.items())

    def state_key(self, parameter: torch.Tensor, key: str) -> str:
        """Name in the checkpoint of a value of a parameter's state."""
        return f"{self._stems[id(parameter)]}{key}"

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in the state of a parameter, by state key."""
        view = self._flat.get(id(parameter))
        found = self.optimizer.state.get(parameter if view is None else view.flat, {})
        tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
        return tensors if view is None else {key: view.cut(one) if one.dim() else one for key, one in tensors.items()}

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient of a parameter."""
        view = self._flat.get(id(parameter))
        if view is None:
            return parameter.grad
        return None if view.flat.grad is None else view.cut(view.flat.grad)

    def give_gradient(self, parameter: torch.Tensor, mine: torch.Tensor) -> None:
        """Set this rank's elements of the gradient of a parameter; those of a flat one are zero until they are set."""
        view = self._flat.get(id(parameter))
        if view is not None:
            if view.flat.grad is None:
                view.flat.grad = torch.zeros_like(view.flat)
            view.cut(view.flat.grad).copy_(mine)
        elif mine.numel() or id(parameter) not in self.slices:
            parameter.grad = _like(parameter, mine)

    def tensors(self) -> Iterator[LiveTensor]:
        """All tensors of the model and of the optimizer's state."""
        yield from self.model_tensors()
        for parameter in self.parameters.values():
            for key, value in self.state_of(parameter).items():
                yield LiveTensor(self.state_key(parameter, key), local(value), self.place_of(parameter, value))

    def model_tensors(self) -> Iterator[LiveTensor]:
        """All parameters and buffers of the model."""
        for name, one in get_model_state_dict(self._model).items():
            for region, mine in shards_of(one) if torch.is_tensor(one) else ():
                yield LiveTensor(self._model_prefix + name, mine, region)

    def place_of(self, parameter: torch.Tensor, value: torch.Tensor) -> Region | Slice:
        """The place of this rank's elements of a parameter, or of a tensor of its state."""
        own = self.slices.get(id(parameter))
        return region_of(value) if own is None or not value.dim() else own

    def restore_model(self, state: Mapping[str, Any]) -> None:
        """Give the loaded state to the model."""
        loaded = _at(state, self.model_path)
        wrapper = self._model_prefix[sum(len(str(key)) + 1 for key in self.model_path) :]
        own = {wrapper + key: loaded[wrapper + key] for key in self._own}
        if wrapper:  # a state_dict() with the prefix of a wrapper
            self._model.load_state_dict(own)
        else:
            set_model_state_dict(self._model, own, options=StateDictOptions(full_state_dict=self._is_full))

    def restore_optimizer(self, state: Mapping[str, Any]) -> None:
        """Give the loaded state to the optimizer."""
        loaded = _at(state, self.optimizer_path or ())
        if any(stem.endswith(f"{_STATE}0.") for stem in self._stems.values()):
            self.optimizer.load_state_dict(loaded)
        else:
            is_flat = not isinstance(loaded.get("state"), Mapping)
            options = StateDictOptions(flatten_optimizer_state_dict=is_flat, full_state_dict=self._is_full)
            set_optimizer_state_dict(self._model, self.optimizer, loaded, options=options)


def _at(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        state = state[key]
    return state


def _like(parameter: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return mine
    found: torch.Tensor = DTensor.from_local(
        mine,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return found


def _prefix(flat: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """What precedes the names of the model in a flat state_dict."""
    first = next(iter(own), "")
    found = sorted({key[: len(key) - len(first)] for key in flat if key.endswith(first)}, key=len)
    fitting = [one for one in found if all(one + name in flat for name in own)]
    live = [one for one in fitting if all(_is_same(flat[one + name], value) for name, value in own.items())]
    if any(key.endswith("_flat_param") for key in flat):
        raise CaseUnusable(
            "its state is a LOCAL_STATE_DICT of FSDP1, without the shapes of the parameters: use get_state_dict, or "
            "StateDictType.SHARDED_STATE_DICT"
        )
    if not own or not fitting:
        raise CaseUnusable(f"its state has no state_dict of the model: no dict in it has all keys, such as {first!r}")
    return (live or fitting)[0]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values share memory, as an EMA of the model does not."""
    pair = (shards_of(value) if isinstance(value, torch.Tensor) else () for value in (one, other))
    return len({tuple(shard.data_ptr() for _, shard in shards) for shards in pair}) == 1
