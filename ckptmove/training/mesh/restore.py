"""The ``keys``, ``restore`` and ``options`` checks: what ``torch.distributed.checkpoint.load`` restores on a rank."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place

from ckptmove.formats.chunks import Chunk
from ckptmove.model import OPAQUE
from ckptmove.proof.equality import difference
from ckptmove.text import some
from ckptmove.training.case.options import OF_SCHEDULERS, is_equal
from ckptmove.training.mesh.reader import ParsedReader, SafePlanner
from ckptmove.training.mesh.stored import Slice, shards_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.model import ParamGroup
    from ckptmove.training.mesh.stored import StoredState
    from ckptmove.training.mesh.subject import Subject

#: A checkpoint has one list of groups, which the ranks of a pipeline overwrite.
_FLATTEN: Final = "save with StateDictOptions(flatten_optimizer_state_dict=True) if ranks have different parameters"
#: Names in a message.
_NAMED: Final = 5


class RestoredRank(NamedTuple):
    """What one rank found after the load."""

    faults: list[str]  # tensors that differ from the checkpoint
    shards: int  # number of tensors and shards that were compared
    elements: int  # number of their elements
    #: whether a tensor or shard is not one of the saved chunks, so that it was assembled from several or cut.
    moved: bool


def key_faults(asked: frozenset[str], stored: StoredState) -> list[str]:
    """Names that only the checkpoint or only the state has; ``dcp.load`` leaves the former out without a message."""
    left = _left_out(asked, stored)
    then = "dcp.load leaves it out" if stored.distributed else "it is not restored"
    found = [("not in the checkpoint", asked - stored.names), (f"not in state, so {then}", left)]
    return [f"{what}: {some(sorted(names), _NAMED)}" for what, names in found if names]


def key_fix(asked: frozenset[str], stored: StoredState) -> str:
    """Fix for a state that only lacks whole entries of the checkpoint, as a step counter; else empty."""
    entries = {name.partition(".")[0] for name in _left_out(asked, stored)}
    lacking = sorted(entries - {name.partition(".")[0] for name in asked})
    if asked - stored.names or not lacking:
        return ""  # other names, or another model
    added = [*(f'"{entry}": ...' for entry in lacking[:_NAMED]), *["..."] * (len(lacking) > _NAMED)]
    return f"add to state= what your script saves and loads too: {{**state, {', '.join(added)}}}"


def _left_out(asked: frozenset[str], stored: StoredState) -> set[str]:
    return {name for name in stored.names - asked if name.rpartition(".")[2] not in OF_SCHEDULERS}


def load(subject: Subject, stored: StoredState, group: Any) -> list[str]:
    """Load the checkpoint into the case; a collective of a process group. Returns the errors.

    ``torch.distributed.checkpoint`` loads its own folders, each the names that it has. From other files, each rank
    copies its shards.
    """
    for path, metadata in stored.distributed:
        reader, planner = ParsedReader(path, metadata), SafePlanner(allow_partial_load=True)
        try:
            load_in_place(subject.state, storage_reader=reader, planner=planner, process_group=group)
        except CheckpointException as error:
            first, _ = min(error.failures.items())[1]
            text = " ".join(str(first).split())
            text = f": {text}" if text else " (the file ends too early)" * isinstance(first, EOFError)
            return [f"dcp.load raises {type(first).__name__}{text}"]
    flat, paths = flatten_state_dict(subject.state)
    errors: list[str] = []
    for name in sorted(stored.in_files & flat.keys()):
        if isinstance(flat[name], torch.Tensor) != (name in stored.tensors):
            errors.append(f"{name} is a tensor only in {'state' if name in stored.objects else 'the checkpoint'}")
        elif name in stored.objects:
            set_element(subject.state, paths[name], stored.objects[name])
        else:
            errors += _copy(flat[name], stored, name)
    if not errors:
        subject.restore()
    return errors


def _copy(value: torch.Tensor, stored: StoredState, name: str) -> Iterator[str]:
    """Copy the shards of a rank from a file into a tensor of the state."""
    shape = stored.tensors[name][1].shape
    if tuple(value.shape) != shape:
        yield f"{name} is {tuple(value.shape)}, stored as {shape}"
        return
    for where, mine in shards_of(value):
        mine.copy_(stored.region(name, where))


def compare(subject: Subject, stored: StoredState) -> RestoredRank:
    """Compare every tensor and shard of this rank with the bytes in the checkpoint, which are read independently."""
    faults: list[str] = []
    shards = elements = 0
    is_moved = False
    seen = set()
    for key, value, where in subject.tensors():
        mine = value.cpu()
        seen.add(key)
        shards, elements = shards + 1, elements + mine.numel()
        if key not in stored.tensors:
            faults.append(f"{key} is not in the checkpoint")
            continue
        if mine.numel() and not isinstance(where, Slice):
            chunks = stored.chunks(key)
            is_moved = is_moved or (bool(chunks) and Chunk(*where) not in chunks)
        apart = difference(mine, stored.region(key, where))
        if apart:
            faults.append(f"{key} differs from the checkpoint{apart}")
    faults += (f"{key} was not restored into the optimizer" for key in sorted(_expected(subject, stored) - seen))
    return RestoredRank(faults, shards, elements, is_moved)


def _expected(subject: Subject, stored: StoredState) -> set[str]:
    """Names of the stored state of the optimizer's parameters; a rank may have no element of a flattened one."""
    held = (one for one in subject.parameters.values() if one.numel() or id(one) not in subject.slices)
    stems = tuple(subject.state_key(one, "") for one in held)
    return {key for key in stored.tensors if key.startswith(stems)} if stems else set()


def option_faults(subject: Subject, stored: StoredState) -> tuple[list[str], int]:
    """Options of the optimizer's groups that differ from the stored ones, and the number of those compared."""
    keys = {id(one): subject.state_key(one, "") for one in subject.parameters.values()}
    faults: Counter[str] = Counter()
    compared = 0
    for home, group, parameters in ((one, *pair) for one in subject.models for pair in one.groups()):
        where = (home.optimizer_prefix or "").rstrip(".")
        groups = [one for place, record in stored.optimizers if place == where for one in record.groups]
        own = {keys[id(one)] for one in parameters if id(one) in keys}
        matching = [*_of(groups, own, where)]
        if own and groups and not matching:
            faults[f"no stored group has {min(own).rpartition('.state.')[2].rstrip('.')}: {_FLATTEN}"] += 1
        for other in matching:
            for name, value in other.options:
                if value is OPAQUE or (name in OF_SCHEDULERS and name not in group):
                    continue
                compared += 1
                if not is_equal(group.get(name), value):
                    faults[f"{other.where}.{name} is {group.get(name)!r}, stored as {value!r}"] += 1
    return list(faults), compared


def _of(groups: list[ParamGroup], own: set[str], where: str) -> Iterator[ParamGroup]:
    """The stored groups with parameters of a live one."""
    prefix = f"{where}." if where else ""
    return (group for group in groups if any(f"{prefix}state.{key}." in own for key in group.params))
