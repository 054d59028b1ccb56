"""Collect the optimizers of a checkpoint during the walk over its tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptmove.checkpoint.inventory.numpy_scalars import scalar_value
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text, members
from ckptmove.model import OPAQUE, FlagValue, OptimizerRecord, ParamGroup, StateEntry
from ckptmove.pickles.tree import Call, Node, PlainTensor, Sequence, items_of
from ckptmove.torch_facts.optimizers import DEVICE_FLAGS, candidates

if TYPE_CHECKING:
    from collections.abc import Callable

    from ckptmove.checkpoint.inventory.flattened import FlatOptimizer
    from ckptmove.model import TensorRecord
    from ckptmove.pickles.tree import Dict, Value


@dataclass(slots=True, eq=False, repr=False)
class EntryDraft:
    """Optimizer state of one parameter, under construction."""

    key: str
    tensors: list[tuple[str, TensorRecord]] = field(default_factory=list)
    scalars: list[tuple[str, object]] = field(default_factory=list)
    nested: list[tuple[str, str]] = field(default_factory=list)
    keys: list[tuple[str, object]] = field(default_factory=list)

    def freeze(self) -> StateEntry:
        """Return the finished entry."""
        return StateEntry(self.key, tuple(self.tensors), tuple(self.scalars), tuple(self.nested), tuple(self.keys))


@dataclass(slots=True, eq=False, repr=False)
class OptimizerDraft:
    """State_dict of an optimizer, under construction."""

    where: str
    groups: tuple[ParamGroup, ...]
    object_keys: dict[int, str]
    mistyped: tuple[str, ...]
    is_flat: bool = False
    _state: list[StateEntry] = field(default_factory=list)
    _entry: EntryDraft | None = None

    def open_entry(self, key: str) -> EntryDraft:
        """Add an empty entry for one parameter; the one before is complete, because the walk is depth-first."""
        self._close_entry()
        self._entry = EntryDraft(key)
        return self._entry

    def _close_entry(self) -> None:
        if self._entry is not None:
            self._state.append(self._entry.freeze())
            self._entry = None

    def freeze(self) -> OptimizerRecord:
        """Return the finished optimizer, with its class detected from its keys."""
        self._close_entry()
        state = tuple(self._state)
        names = candidates(self.groups, state)
        algorithm = names[0] if names else None
        return OptimizerRecord(self.where, self.groups, state, algorithm, names, self.mistyped, self.is_flat)


def draft_optimizer(pairs: Dict, where: str, spend: Callable[[int], None]) -> OptimizerDraft:
    """Create the draft of an optimizer from its state_dict.

    ``spend`` is called with the number of values in each group before they are copied; groups may share lists.
    """
    object_keys: dict[int, str] = {}
    groups = []
    listed = pairs.get("param_groups")
    for index, item in enumerate(items_of(listed)):
        group = as_dict(item)
        if group is not None:
            spend(_option_count(group))
            groups.append(
                _group(group, f"{where}.param_groups.{index}" if where else f"param_groups.{index}", object_keys)
            )
    return OptimizerDraft(where, tuple(groups), object_keys, _mistyped(pairs))


def draft_flat_optimizer(flat: FlatOptimizer, where: str, spend: Callable[[int], None]) -> OptimizerDraft:
    """Create the draft of a flat optimizer, with one group for each parameter."""
    groups = []
    prefix = f"{where}.param_groups." if where else "param_groups."
    for name, options in flat.groups:
        spend(_option_count(options))
        groups.append(_group(options, f"{prefix}{name}", {})._replace(params=(name,)))
    return OptimizerDraft(where, tuple(groups), {}, (), is_flat=True)


def _option_count(group: Dict) -> int:
    return len(group.flat) + sum(len(items_of(value)) for value in group.flat[1::2])


def _mistyped(pairs: Dict) -> tuple[str, ...]:
    """Return keys of the state whose type differs from that in the groups: JSON, for example, makes text of numbers."""
    state = as_dict(pairs.get("state"))
    groups = [group for item in items_of(pairs.get("param_groups")) if (group := as_dict(item)) is not None]
    listed = {key for group in groups for key in items_of(group.get("params")) if type(key) in {int, str}}
    keys = [key for key in (state.keys() if state is not None else ()) if type(key) in {int, str} and key not in listed]
    texts = {str(key) for key in listed}
    return tuple(str(key) for key in keys if str(key) in texts)


def _group(pairs: Dict, where: str, object_keys: dict[int, str]) -> ParamGroup:
    options: list[tuple[str, object]] = []
    flags: list[FlagValue] = []
    params: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    for name, value, start in members(pairs):
        if name == "params":
            params = tuple(_parameter_key(item, object_keys) for item in items_of(value))
        elif name == "param_names":
            names = tuple(item for item in items_of(value) if type(item) is str)
        elif not isinstance(value, Node):
            options.append((name, value))
            if name in DEVICE_FLAGS and isinstance(value, bool):
                flags.append(FlagValue(name, value, start))
        elif isinstance(value, Sequence) and not any(isinstance(item, Node) for item in value.items):
            options.append((name, tuple(value.items)))
        else:
            number = scalar_value(value)
            options.append((name, OPAQUE if number is None else number))
    return ParamGroup(where, params, names, tuple(options), tuple(flags))


def _parameter_key(item: Value, object_keys: dict[int, str]) -> str:
    """Return the key of a parameter; a pickled optimizer lists the parameters themselves, which get numbers."""
    if isinstance(item, Call | PlainTensor):
        return object_keys.setdefault(id(item), str(len(object_keys)))
    return key_text(item)
