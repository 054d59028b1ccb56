"""The ``keys``, ``restore`` and ``options`` checks: what ``torch.distributed.checkpoint.load`` restores on a rank."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place

from ckptmove.model import OPAQUE
from ckptmove.verification.checks import listed
from ckptmove.verification.mesh.reader import ParsedReader, SafePlanner
from ckptmove.verification.mesh.stored import local, region_of
from ckptmove.verification.state import bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ckptmove.checkpoint.layouts.distributed_part import DistributedPart
    from ckptmove.model import ParamGroup
    from ckptmove.verification.mesh.stored import StoredRegions
    from ckptmove.verification.mesh.subject import Subject

#: Options that a learning rate scheduler adds to a group: a case without one lacks them.
_OF_SCHEDULERS: Final = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
#: Names in a message.
_NAMED: Final = 5


class Restored(NamedTuple):
    """What one rank found after the load.

    Attributes:
        faults: tensors that differ from the checkpoint.
        shards: number of tensors and shards that were compared.
        elements: number of their elements.
        moved: whether a tensor or shard is not one of the saved chunks, so that it was assembled from several or cut.
    """

    faults: list[str]
    shards: int
    elements: int
    moved: bool


def key_faults(asked: frozenset[str], part: DistributedPart) -> list[str]:
    """Names that only the checkpoint or only the state has; ``dcp.load`` leaves the former out without a message.

    Args:
        asked: names in the state of any rank.
        part: the checkpoint.
    """
    stored = {entry.name for entry in part.metadata.entries}
    left = {name for name in stored - asked if name.rpartition(".")[2] not in _OF_SCHEDULERS}
    found = [("not in the checkpoint", asked - stored), ("not in state, so dcp.load leaves it out", left)]
    return [f"{what}: {listed(sorted(names), _NAMED)}" for what, names in found if names]


def load(subject: Subject, part: DistributedPart) -> list[str]:
    """Load the checkpoint into the case; a collective. Returns the errors of torch."""
    try:
        load_in_place(subject.state, storage_reader=ParsedReader(part.path, part.metadata), planner=SafePlanner())
    except CheckpointException as error:
        return [_error_text(one[0]) for _, one in sorted(error.failures.items())][:1]
    subject.restore()
    return []


def _error_text(error: BaseException) -> str:
    return f"dcp.load raises {type(error).__name__}: {' '.join(str(error).split())}"


def compare(subject: Subject, stored: StoredRegions) -> Restored:
    """Compare every tensor and shard of this rank with the bytes in the checkpoint, which are read independently."""
    faults: list[str] = []
    shards = elements = 0
    is_moved = False
    seen = set()
    for key, value in subject.tensors():
        mine, region = local(value).cpu(), region_of(value)
        seen.add(key)
        shards, elements = shards + 1, elements + mine.numel()
        tensor = stored.tensors.get(key)
        if tensor is None:
            faults.append(f"{key} is not in the checkpoint")
            continue
        if mine.numel():
            is_moved = is_moved or (*region,) not in {(chunk.offsets, chunk.sizes) for chunk in tensor.chunks}
        fault = _difference(mine, stored.region(key, region))
        if fault:
            faults.append(f"{key} {fault}")
    faults += (f"{key} was not restored into the optimizer" for key in sorted(_expected(subject, stored) - seen))
    return Restored(faults, shards, elements, is_moved)


def _expected(subject: Subject, stored: StoredRegions) -> set[str]:
    """Names of the stored state of the optimizer's parameters."""
    stems = tuple(subject.state_key(one, "") for one in subject.parameters.values())
    return {key for key in stored.tensors if key.startswith(stems)} if stems else set()


def _difference(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return f"is {mine.dtype} {tuple(mine.shape)}, stored as {theirs.dtype} {tuple(theirs.shape)}"
    count = int((bits(mine.contiguous()) != bits(theirs)).sum())
    return f"differs from the checkpoint in {count:,} of {mine.numel():,} elements" if count else ""


def option_faults(subject: Subject, part: DistributedPart) -> tuple[list[str], int]:
    """Options of the optimizer's groups that differ from the stored ones, and the number of those compared."""
    where = (subject.optimizer_prefix or "").rstrip(".")
    groups = [group for record in part.inventory.optimizers if record.where == where for group in record.groups]
    keys = {id(one): subject.state_key(one, "") for one in subject.parameters.values()}
    faults: Counter[str] = Counter()
    compared = 0
    for group in subject.optimizer.param_groups:
        own = {keys[id(one)] for one in group["params"] if id(one) in keys}
        for stored in _of(groups, own, where):
            for name, value in stored.options:
                if value is OPAQUE or (name in _OF_SCHEDULERS and name not in group):
                    continue
                compared += 1
                mine = _plain(group.get(name))
                if mine != _plain(value):
                    faults[f"{stored.where}.{name} is {mine!r}, stored as {_plain(value)!r}"] += 1
    return list(faults), compared


def _of(groups: list[ParamGroup], own: set[str], where: str) -> Iterator[ParamGroup]:
    """The stored groups with parameters of a live one."""
    prefix = f"{where}." if where else ""
    return (group for group in groups if any(f"{prefix}state.{key}." in own for key in group.params))


def _plain(value: Any) -> Any:
    """An option as a value that compares: lists as tuples."""
    return tuple(value) if isinstance(value, list) else value
