"""Optimizers of Megatron-Core: state by name in a distributed checkpoint, and options in ``common.pt``.

From megatron/core: ``sharded_state_dict`` in optimizer/optimizer.py, ``state_dict`` and
``sharded_param_state_fs_model_space`` in optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.optimizers import draft_optimizer
from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.model import OptimizerRecord, ParamGroup, StateEntry
from ckptmove.torch_facts.optimizers import candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckptmove.model import TensorRecord
    from ckptmove.pickles.tree import Dict, Value

#: Name of a state tensor: its key, and the name of its parameter; ``chained_`` if there are several optimizers.
_STATE: Final = r"((?:chained_\d+\.)?optimizer)\.state\.([^.]+)\.(.+)"
#: State in flat buckets, or gathered on one rank.
_FLAT: Final = r"(?:chained_\d+\.)?optimizer\.distributed\..+"
#: Key of the options in one file that was made of the checkpoint: the name of ``common.pt`` without its suffix.
_COMMON: Final = r"(?:(.+)/)?common"
#: State key of the fp32 copy that the optimizer steps in place of a parameter in bf16 or fp16.
_COPY: Final = "fp32_param"
#: What a step of Adam needs, and its state. The names of the group are also those of apex and Transformer Engine.
_OPTIONS: Final = ("lr", "betas", "eps", "weight_decay")
_ADAM: Final = frozenset({"exp_avg", "exp_avg_sq"})
#: Options that a step reads.
_READ: Final = (
    "lr",
    "weight_decay",
    "betas",
    "eps",
    "momentum",
    "dampening",
    "nesterov",
    "amsgrad",
    "maximize",
    "step",
)


class StoredOptions(NamedTuple):
    """Options in ``common.pt``.

    Attributes:
        file: path of the file.
        groups: the groups of all optimizers; Megatron does not record their parameters.
        steps: names of the tensors of a step count that all parameters share.
    """

    file: str
    groups: tuple[ParamGroup, ...]
    steps: tuple[str, ...]


def stored_options(root: Value, file: str, spend: Callable[[int], None]) -> StoredOptions:
    """Read the options of the optimizers in the tree of ``common.pt``.

    Args:
        root: the tree.
        file: path of the file, which begins the names of its tensors.
        spend: as of :func:`ckptmove.checkpoint.inventory.optimizers.draft_optimizer`.

    Raises:
        LimitExceeded: as ``spend``.
    """
    groups: list[ParamGroup] = []
    steps: list[str] = []
    for where, pairs in _holders(root, file):
        groups += draft_optimizer(pairs, where, spend).groups
        state = as_dict(pairs.get("state"))
        if state is not None and state.get("common_step") is not None:
            steps.append(f"{where}.state.common_step")
    return StoredOptions(file, tuple(groups), tuple(steps))


def _holders(root: Value, file: str) -> Iterator[tuple[str, Dict]]:
    """The dicts with ``param_groups``: of the optimizer, of the one inside it, or of each of a chain."""
    pairs = as_dict(root)
    outer = None if pairs is None else as_dict(pairs.get("optimizer"))
    found = [] if outer is None else [(f"{file}.optimizer", outer)]
    for _ in range(2):
        inner = []
        for where, holder in found:
            if holder.get("param_groups") is not None:
                yield where, holder
                continue
            keyed = (
                (key, as_dict(value)) for key, value, _ in holder.pairs() if key == "optimizer" or type(key) is int
            )
            inner += [(f"{where}.{key}", one) for key, one in keyed if one is not None]
        found = inner
    yield from ((where, holder) for where, holder in found if holder.get("param_groups") is not None)


def is_state(name: str) -> bool:
    """Whether a tensor of the distributed checkpoint is state of an optimizer."""
    return re.fullmatch(_STATE, name) is not None or re.fullmatch(_FLAT, name) is not None


def gathered_optimizers(
    optimizers: tuple[OptimizerRecord, ...],
    tensors: Iterable[TensorRecord],
    root: Value,
    spend: Callable[[int], None],
) -> tuple[OptimizerRecord, ...]:
    """Optimizers of one file, with those of Megatron if it was made of a distributed checkpoint and ``common.pt``.

    Args:
        optimizers: the other optimizers of the file.
        tensors: its tensors.
        root: its tree.
        spend: as of :func:`stored_options`.

    Raises:
        LimitExceeded: as ``spend``.
    """
    pairs = as_dict(root)
    keyed = () if pairs is None else ((key, value) for key, value, _ in pairs.pairs() if type(key) is str)
    commons = {key: value for key, value in keyed if re.fullmatch(_COMMON, key) and as_dict(value) is not None}
    by_name = {one.name: one for one in tensors} if commons else {}
    names, places = sorted(by_name), {name: place for place, name in enumerate(by_name)}
    found: list[OptimizerRecord] = []
    holders: set[str] = set()
    for key, value in commons.items():
        folder = key.rpartition("/")[0]
        prefix = f"{folder}." if folder else ""
        inside = names[bisect_left(names, prefix) : bisect_left(names, f"{folder}/") if folder else None]
        own = {name[len(prefix) :]: by_name[name] for name in sorted(inside, key=places.__getitem__)}
        if any(map(is_state, own)):
            found += megatron_optimizers(prefix, own, (), stored_options(value, key, spend), by_name)
            holders.add(key)
    # With a common step count, the dict of the options looks like that of an optimizer.
    return (*found, *(one for one in optimizers if _common_of(one.where) not in holders)) if found else optimizers


def _common_of(where: str) -> str:
    """The key of the options that a path is below; empty if it is below none."""
    folder, dot, _ = where.partition("common.")
    return folder + dot.rstrip(".")


def megatron_optimizers(
    prefix: str,
    tensors: Mapping[str, TensorRecord],
    objects: Iterable[str],
    stored: StoredOptions,
    steps: Mapping[str, TensorRecord],
) -> tuple[OptimizerRecord, ...]:
    """Optimizers of a distributed checkpoint of Megatron.

    Args:
        prefix: path of the checkpoint with a dot at its end, or nothing.
        tensors: tensors of the checkpoint by their names in it.
        objects: names in it of other objects.
        stored: contents of ``common.pt``.
        steps: tensors of ``common.pt``, by name.
    """
    state: dict[str, dict[str, list[tuple[str, TensorRecord]]]] = {}
    for name, record in tensors.items():
        match = re.fullmatch(_STATE, name)
        if match is not None:
            state.setdefault(match[1], {}).setdefault(match[3], []).append((match[2], record))
    if not state:
        flat = next((name for name in (*tensors, *objects) if re.fullmatch(_FLAT, name)), "")
        reason = f"{flat} is in the order of buckets, without the names of the parameters"
        return (OptimizerRecord(f"{prefix}optimizer", (), (), obstacle=reason),) if flat else ()
    return tuple(_optimizer(f"{prefix}{where}", own, stored, steps) for where, own in state.items())


def copies(optimizer: OptimizerRecord, tensors: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """The fp32 copies that an optimizer steps in place of parameters, by their keys.

    Args:
        optimizer: the optimizer.
        tensors: tensors of its checkpoint, by name.
    """
    keys = (key for group in optimizer.groups for key in group.params)
    found = {key: tensors.get(f"{optimizer.where}.state.{_COPY}.{key}") for key in keys}
    return {key: record for key, record in found.items() if record is not None}


def _optimizer(
    where: str,
    state: Mapping[str, list[tuple[str, TensorRecord]]],
    stored: StoredOptions,
    steps: Mapping[str, TensorRecord],
) -> OptimizerRecord:
    each = [dict(group.options) for group in stored.groups]
    own = {key: value for key, value in each[0].items() if all(one.get(key) == value for one in each)} if each else {}
    count, shared = own.pop("step", None), [steps[name] for name in stored.steps if name in steps]
    scalars = (("step", count),) if type(count) is int else ()
    tensors = tuple(("step", record) for record in shared) if not scalars and len(shared) == 1 else ()
    entries = tuple(
        StateEntry(key, (*(pair for pair in found if pair[0] != _COPY), *tensors), scalars)
        for key, found in state.items()
    )
    place = stored.groups[0].where if each else f"{where}.param_groups.0"
    group = ParamGroup(place, tuple(state), (), tuple(own.items()), ())
    kinds = frozenset(key for found in state.values() for key, _ in found) - {_COPY}
    names = candidates((group,), entries)
    if not names and kinds == _ADAM and own.keys() >= set(_OPTIONS) and own.get("bias_correction", True) is True:
        names = ("AdamW", "Adam")
    lacking = [key for key in _OPTIONS if key not in own] if kinds == _ADAM else []
    differing = [key for key in _READ if any(one.get(key) != each[0].get(key) for one in each)]
    obstacle = ""
    if not each:
        obstacle = f"{stored.file} has no param_groups"
    elif differing:
        which = " and ".join(differing)
        obstacle = f"{stored.file} has {len(each)} param_groups with different {which}, and not their parameters"
    elif lacking:
        obstacle = f"{stored.file} does not record {' and '.join(lacking)}"
    elif not (scalars or tensors):
        obstacle = f"{stored.file} does not record the step count"
    algorithm = names[0] if names and not obstacle else None
    return OptimizerRecord(where, (group,), entries, algorithm, names if algorithm else (), obstacle=obstacle)
