"""Optimizers of Megatron-Core: state by name in a distributed checkpoint, and options in ``common.pt``.

From megatron/core: ``sharded_state_dict`` in optimizer/optimizer.py, ``state_dict``,
``sharded_param_state_fs_model_space`` and, for flat buckets, ``sharded_param_state_dp_reshardable`` and
``sharded_param_state_dp_zero`` in optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from ckptmove.checkpoint.inventory.optimizers import draft_optimizer
from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.model import OptimizerRecord, ParamGroup, StateEntry
from ckptmove.pickles.tree import items_of
from ckptmove.torch_facts.optimizers import candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ckptmove.model import TensorRecord
    from ckptmove.pickles.tree import Dict, Value

#: Name of a state tensor: its key, and the name of its parameter; ``chained_`` if there are several optimizers.
_STATE: Final = r"((?:chained_\d+\.)?optimizer)\.state\.([^.]+)\.(.+)"
#: State in flat buckets, or gathered on one rank.
_FLAT: Final = r"(?:chained_\d+\.)?optimizer\.distributed\..+"
_BEGINNINGS: Final = ("chained_", "optimizer.")
_FLAT_OPTIMIZER: Final = r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)"
#: Name of a tensor in a flat bucket: its optimizer, its bucket, and its key.
_IN_BUCKET: Final = _FLAT_OPTIMIZER + r"\.(gbuf_idx_\d+\..+|param_state/.+)\.([^.]+)"
#: Beginning of the names of buckets that ranks save with their padding, which is uninitialized memory: between
#: parameters and at the end (``sharded_param_state_dp_reshardable``). No file tells where all of it is.
_PADDED: Final = "gbuf_idx_"
#: Name of the object with the options of an optimizer with flat buckets.
_FLAT_OPTIONS: Final = _FLAT_OPTIMIZER + r"\.optimizer/.+"
#: Key of the options in one file that was made of the checkpoint: the name of ``common.pt`` without its suffix.
_COMMON: Final = r"(?:(.+)/)?common"
#: State keys of the fp32 copy that the optimizer steps in place of a parameter in bf16 or fp16.
_COPIES: Final = ("fp32_param", "param")
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
    """Options in ``common.pt``."""

    file: str  # path of the file
    groups: tuple[ParamGroup, ...]  # the groups of all optimizers; Megatron does not record their parameters
    steps: tuple[str, ...]  # names of the tensors of a step count that all parameters share


class FlatBuckets(NamedTuple):
    """How to read flat buckets of parameters."""

    content: Callable[[], Dict | None]  # returns the values of the distributed checkpoint, by name
    spend: Callable[[int], None]  # as of `draft_optimizer`


def stored_options(root: Value, file: str, spend: Callable[[int], None]) -> StoredOptions:
    """Read the options of the optimizers in the tree of ``common.pt``.

    The path of the file begins the names of its tensors. ``spend`` is as of
    :func:`ckptmove.checkpoint.inventory.optimizers.draft_optimizer`.
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
    if not name.startswith(_BEGINNINGS):  # asked for each of millions of names
        return False
    return re.fullmatch(_STATE, name) is not None or re.fullmatch(_FLAT, name) is not None


def gathered_optimizers(
    optimizers: tuple[OptimizerRecord, ...],
    tensors: Iterable[TensorRecord],
    root: Value,
    spend: Callable[[int], None],
) -> tuple[OptimizerRecord, ...]:
    """Optimizers of one file, with those of Megatron if it was made of a distributed checkpoint and ``common.pt``."""
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
            flat = FlatBuckets(partial(_below, root, folder), spend)
            found += megatron_optimizers(prefix, own, (), stored_options(value, key, spend), by_name, flat)
            holders.add(key)
    # With a common step count, the dict of the options looks like that of an optimizer.
    return (*found, *(one for one in optimizers if _common_of(one.where) not in holders)) if found else optimizers


def _below(root: Value, folder: str) -> Dict | None:
    """The values of a distributed checkpoint in one file."""
    pairs = as_dict(root)
    return pairs if pairs is None or not folder else as_dict(pairs.get(folder))


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
    flat: FlatBuckets,
) -> tuple[OptimizerRecord, ...]:
    """Optimizers of a distributed checkpoint of Megatron.

    Args:
        prefix: path of the checkpoint with a dot at its end, or nothing.
        stored: contents of ``common.pt``.
        steps: tensors of ``common.pt``, by name.
    """
    state: dict[str, dict[str, list[tuple[str, TensorRecord]]]] = {}
    buckets: dict[str, dict[str, list[tuple[str, TensorRecord]]]] = {}
    for name, record in tensors.items():
        match = re.fullmatch(_STATE, name)
        if match is not None:
            state.setdefault(match[1], {}).setdefault(match[3], []).append((match[2], record))
        match = re.fullmatch(_IN_BUCKET, name)
        if match is not None:
            buckets.setdefault(match[1], {}).setdefault(match[2], []).append((match[3], record))
    if state:
        return tuple(_optimizer(f"{prefix}{where}", own, stored, steps) for where, own in state.items())
    if buckets and all(map(_is_steppable, chain.from_iterable(own.values() for own in buckets.values()))):
        options = _options_of_buckets(flat.content(), prefix, flat.spend)
        found = []
        for where, own in buckets.items():
            place = f"{prefix}{where}"
            if any(key.startswith(_PADDED) for key in own):
                reason = f"the buckets of {place} have padding with values of uninitialized memory"
                found.append(OptimizerRecord(place, (), (), obstacle=reason))
            else:
                found.append(_optimizer(place, own, options.get(where, stored), steps))
        return tuple(found)
    unread = next((name for name in (*tensors, *objects) if re.fullmatch(_FLAT, name)), "")
    reason = f"{unread} is in the order of buckets, without the names of the parameters"
    return (OptimizerRecord(f"{prefix}optimizer", (), (), obstacle=reason),) if unread else ()


def _is_steppable(bucket: Sequence[tuple[str, TensorRecord]]) -> bool:
    """Whether a bucket has the fp32 parameters next to state of as many elements."""
    shapes = {record.shape for _, record in bucket}
    keys = {key for key, _ in bucket}
    return "param" in keys and len(keys) > 1 and len(shapes) == 1 and len(next(iter(shapes))) == 1


def _options_of_buckets(content: Dict | None, prefix: str, spend: Callable[[int], None]) -> dict[str, StoredOptions]:
    """Options that are next to the buckets of an optimizer, by the name of the optimizer."""
    found = {}
    for key, value, _ in () if content is None else content.pairs():
        name = key if type(key) is str else ""
        match = re.fullmatch(_FLAT_OPTIONS, name)
        listed = items_of(value)  # Megatron saves the object of one rank in a list
        pairs = as_dict(listed[0] if listed else value)
        if match is not None and pairs is not None:
            where = f"{prefix}{name}.0" if listed else f"{prefix}{name}"
            found[match[1]] = StoredOptions(f"{prefix}{name}", draft_optimizer(pairs, where, spend).groups, ())
    return found


def is_in_buckets(optimizer: OptimizerRecord) -> bool:
    """Whether the parameters of an optimizer are flat buckets."""
    return re.search(rf"(?:^|\.){_FLAT_OPTIMIZER}$", optimizer.where) is not None


def copies(optimizer: OptimizerRecord, tensors: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """The fp32 copies that an optimizer steps in place of parameters, by their keys."""
    where, is_flat = optimizer.where, is_in_buckets(optimizer)
    found: dict[str, TensorRecord] = {}
    for key in (key for group in optimizer.groups for key in group.params):
        names = [f"{where}.{key}.param"] if is_flat else [f"{where}.state.{copy}.{key}" for copy in _COPIES]
        found.update((key, tensors[name]) for name in names if name in tensors)
    return found


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
        StateEntry(key, (*(pair for pair in found if pair[0] not in _COPIES), *tensors), scalars)
        for key, found in state.items()
    )
    place = stored.groups[0].where if each else f"{where}.param_groups.0"
    group = ParamGroup(place, tuple(state), (), tuple(own.items()), ())
    kinds = frozenset(key for found in state.values() for key, _ in found) - {*_COPIES}
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
