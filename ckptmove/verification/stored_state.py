"""The state_dicts that a script would have loaded from a checkpoint, built from the bytes as they lie in it.

Never unpickles, and never guesses in silence: what does not match the user's model is named.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from ckptmove.directories import DirectoryInventory
from ckptmove.model import OPAQUE
from ckptmove.scopes import strip_wrappers
from ckptmove.verification.checks import Offenders
from ckptmove.verification.entries import each_tensor, tensor_options
from ckptmove.verification.pieces import is_dense

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from ckptmove.model import Inventory, OptimizerRecord, StateEntry, TensorRecord
    from ckptmove.verification.pieces import TensorSource

#: What torch.compile and FSDP put before the keys of a module inside another one.
_INNER_WRAPPERS: Final = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module)\.")
_ROLES: Final = ("model", "ema")


class Mismatch(Exception):
    """The stored state does not fit what the user has built; the message says which of it."""


def model_state(
    model_keys: Mapping[str, torch.Tensor], inventory: Inventory, source: TensorSource
) -> tuple[str, dict[str, torch.Tensor]]:
    """The state_dict in a checkpoint that a model's own keys point to, under the model's keys.

    Args:
        model_keys: the model's own state_dict.
        inventory: of the checkpoint.
        source: of its tensors.

    Returns:
        The path of the state_dict in the checkpoint, and its tensors, on the CPU.

    Raises:
        Mismatch: keys are missing or too many, or shapes differ, wrapper prefixes aside.
        UnreadableInput: a tensor's bytes cannot be had.
    """
    wanted = {_bare(key): key for key in model_keys}
    where, stored = _entry(wanted, inventory)
    if not stored:
        raise Mismatch(
            "the model does not fit the checkpoint: no key of the model is in the checkpoint; "
            f"{_names_of_both(wanted, inventory)}"
        )
    faults = Offenders()
    missing = [key for bare, key in wanted.items() if bare not in stored]
    for key in _without_twin(missing, model_keys, wanted, stored):
        faults.add(f"missing {key}")
    for bare, record in stored.items():
        if bare not in wanted:
            faults.add(f"unexpected {record.name}")
        elif not is_dense(record):
            faults.add(f"{record.name} is a {record.kind}, without plain values")
        elif record.shape != tuple(model_keys[wanted[bare]].shape):
            faults.add(f"{record.name} is {_sizes(record.shape)}, the model's {_sizes(model_keys[wanted[bare]].shape)}")
    if faults:
        place = f"the checkpoint's '{where}'" if where else "the checkpoint"
        raise Mismatch(f"the model does not fit {place}: {faults}")
    state = {wanted[bare]: source.tensor(record) for bare, record in stored.items()}
    for key in missing:  # tied, and stored once
        state[key] = next(value for twin, value in state.items() if model_keys[twin] is model_keys[key])
    return where, state


def optimizer_state(optimizer: OptimizerRecord, inventory: Inventory, source: TensorSource) -> dict[str, Any]:
    """The state_dict of an optimizer, for ``load_state_dict``.

    Options that the file holds as objects are left out: the optimizer's own stay.

    Raises:
        UnreadableInput: a tensor's bytes cannot be had.
    """
    records = {record.name: record for record in inventory.tensors if ".param_groups." in f".{record.name}"}
    groups = []
    for group in optimizer.groups:
        options = {key: value for key, value in group.options if value is not OPAQUE}
        for key, option in tensor_options(group, records).items():
            options[key] = each_tensor(option, source.tensor)
        groups.append({**options, "params": list(group.params)})
    state = {entry.key: _values(entry, source) for entry in optimizer.state}
    if optimizer.algorithm == "LBFGS":
        for values in state.values():
            values.pop("al", None)  # scratch of the two-loop recursion, half of it None: it is made anew
    return {"state": state, "param_groups": groups}


def _values(entry: StateEntry, source: TensorSource) -> dict[str, object]:
    """An entry as the optimizer knows it: ``old_dirs.0`` and ``old_dirs.1`` are one list."""
    flat: dict[str, object] = {
        **dict(entry.scalars), **{key: source.tensor(record) for key, record in entry.tensors}
    }  # fmt: skip
    values: dict[str, object] = {}
    for key, value in flat.items():
        head, dot, index = key.partition(".")
        if dot and index.isdigit():
            values[head] = [*values.get(head, ()), value]  # type: ignore[misc]  # a list that was begun here
        else:
            values[key] = value
    return values


def _names_of_both(wanted: Mapping[str, str], inventory: Inventory) -> str:
    """A key of the model and one of the checkpoint, the same but for what is before it, where there are such."""
    stored = {_tail(record.name): record.name for record in inventory.tensors if record.role in _ROLES}
    if not stored or not wanted:
        return f"the {'checkpoint' if wanted else 'model'} has none"
    key = next((key for key in wanted if _tail(key) in stored), next(iter(wanted)))
    return f"the model has {wanted[key]}, the checkpoint {stored.get(_tail(key), next(iter(stored.values())))}"


def _tail(key: str) -> str:
    return ".".join(key.rsplit(".", 2)[-2:])


def _entry(wanted: Mapping[str, str], inventory: Inventory) -> tuple[str, dict[str, TensorRecord]]:
    """The path under which most of the model's keys stand, and all that stands there."""
    candidates = [record for record in inventory.tensors if record.role in _ROLES]
    found: Counter[tuple[str, str]] = Counter()
    for record in candidates:
        for where, key in _splits(record.name):
            if _bare(key) in wanted:
                found[where, record.role] += 1
    if not found:
        return "", {}
    best = min(found, key=lambda place: (-found[place], _ROLES.index(place[1]), len(place[0])))[0]
    stored = _below(best, candidates)
    if best in _files(inventory):  # a shard: the others hold the rest
        for where, _ in found:
            shard = _below(where, candidates)
            if where in _files(inventory) and not shard.keys() & stored.keys():
                stored.update(shard)
    return best, stored


def _below(where: str, records: Iterable[TensorRecord]) -> dict[str, TensorRecord]:
    inside = where + "." * bool(where)
    return {_bare(record.name[len(inside) :]): record for record in records if record.name.startswith(inside)}


def _files(inventory: Inventory) -> frozenset[str]:
    files = inventory.files if isinstance(inventory, DirectoryInventory) else ()
    return frozenset(file.path for file in files)


def _splits(name: str) -> Iterable[tuple[str, str]]:
    """Every way to cut a name into a path and a key below it."""
    yield "", name
    for dot, letter in enumerate(name):
        if letter == ".":
            yield name[:dot], name[dot + 1 :]


def _bare(key: str) -> str:
    """A key without what wrappers have put into it."""
    return _INNER_WRAPPERS.sub("", strip_wrappers(key)[1])


def _without_twin(
    missing: list[str],
    own: Mapping[str, torch.Tensor],
    wanted: Mapping[str, str],
    stored: Mapping[str, TensorRecord],
) -> list[str]:
    """The keys of which no other name is stored: safetensors keeps one name of tied weights."""
    present = {id(own[key]) for bare, key in wanted.items() if bare in stored}
    return [key for key in missing if id(own[key]) not in present]


def _sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
