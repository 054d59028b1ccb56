"""Find the schedulers, scalers, EMAs and RNG states of a checkpoint, and note which of them a training takes.

The values decide, not the names or the functions: a part is taken if a call that restores is given its values, or if an
object of the training has them at the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptmove.checkpoint.entries import entries
from ckptmove.checkpoint.inventory.shapes import key_text
from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.pickles.tree import Node, Sequence

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Collection, Iterable, Iterator

    from ckptmove.checkpoint.entries import StoredMember
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import Role, TensorRecord
    from ckptmove.pickles.tree import Value
    from ckptmove.verification.place import StepDevice

#: Roles of the parts, in the order of the report.
ROLES: Final[tuple[Role, ...]] = ("scaler", "scheduler", "ema", "rng")
#: Roles whose tensors are their values; the others are numbers.
_OF_TENSORS: Final = frozenset({"ema", "rng"})
#: Tensors of an EMA that are looked for: the largest.
_LOOKED_FOR: Final = 3
#: Keys of a scheduler that do not change its learning rates: one that is built at the stored epoch has other values.
_BOOKKEEPING: Final = frozenset({"_step_count", "_get_lr_called_within_step", "_is_initial", "verbose"})
#: The state of a device's generator is at most so long, and that of mps exactly; that of the CPU is far longer.
_DEVICE_STATE: Final = 64
_MPS_STATE: Final = 44
#: Classes whose objects show that they have the values of a part, and what returns these.
_KINDS: Final[tuple[tuple[Role, type, Callable[[Any], Mapping[str, Any]]], ...]] = (
    ("scheduler", LRScheduler, vars),
    ("scaler", torch.amp.GradScaler, lambda one: one.state_dict()),
)


class StoredPart(NamedTuple):
    """A part of a checkpoint that a resume needs, besides models and optimizers.

    Attributes:
        path: its path in the checkpoint.
        role: its role.
        value: its value in the tree.
        atoms: its numbers and texts by their path in it.
        containers: paths in it of the part itself and of its dicts, each with a dot at the end.
        tensors: its tensors.
    """

    path: str
    role: Role
    value: Value
    atoms: Mapping[str, object]
    containers: tuple[str, ...]
    tensors: tuple[TensorRecord, ...]


class Taking:
    """The parts of a checkpoint that a training has not taken so far.

    Attributes:
        parts: all parts.
        left: those that were not taken.
    """

    def __init__(
        self, parts: Iterable[StoredPart], tensor: Callable[[TensorRecord], torch.Tensor], place: StepDevice
    ) -> None:
        """Begin with nothing taken.

        Args:
            parts: the parts.
            tensor: returns a stored tensor on the CPU.
            place: the device of the training.
        """
        self.parts = tuple(parts)
        self.left = [*self.parts]
        self._tensor = tensor
        self._place = place

    def note(self, value: object) -> None:
        """Note the argument of a call that restores something."""
        if self.left:
            atoms, tensors = _leaves(value)
            self.left = [one for one in self.left if not self._equals(one, atoms, tensors)]

    def note_live(
        self,
        live: Callable[[type[Any]], list[Any]],
        tensors: Callable[[], Iterable[weakref.ref[torch.Tensor]]],
        is_idle: Callable[[torch.Tensor], bool],
    ) -> None:
        """Note parts whose values objects of the training have at its step.

        Args:
            live: returns the instances of a class.
            tensors: returns the tensors of the training. References that are not weak would look like those of its own.
            is_idle: whether a tensor was loaded, and nothing uses it.
        """
        for role, kind, values in _KINDS:
            if any(part.role == role for part in self.left):
                held = [_leaves(values(one))[0] for one in live(kind)]
                self.left = [
                    one for one in self.left if one.role != role or not any(_is_like(one, own) for own in held)
                ]
        if any(part.role == "ema" for part in self.left):
            known = [*tensors()]
            self.left = [one for one in self.left if one.role != "ema" or not self._is_held(one, known, is_idle)]

    def _equals(self, part: StoredPart, atoms: Mapping[str, object], tensors: Collection[torch.Tensor]) -> bool:
        if part.role != "ema" and _has(part, atoms):
            return True
        if not part.tensors or (part.atoms and part.role not in _OF_TENSORS):
            return False
        found = (any(self._is_same(one, record) for one in tensors) for record in _largest(part))
        return all(found) if part.role == "ema" else any(found)  # a machine may have fewer devices than states

    def _is_held(
        self,
        part: StoredPart,
        known: Collection[weakref.ref[torch.Tensor]],
        is_idle: Callable[[torch.Tensor], bool],
    ) -> bool:
        """Whether the training holds the tensors of a part."""
        return all(
            any(
                (one := known_as()) is not None and self._is_same(one, record) and not is_idle(one)
                for known_as in known
            )
            for record in _largest(part)
        )

    def _is_same(self, now: torch.Tensor, record: TensorRecord) -> bool:
        if tuple(now.shape) != record.shape:
            return False
        values, stored = self._place.to_cpu(now), self._tensor(record)
        with torch._C.DisableTorchFunction():  # the record of the script's calls would keep the intermediate tensors
            return is_same(values, stored)


def stored_parts(checkpoint: OpenCheckpoint, target: str) -> list[StoredPart]:
    """The parts of a checkpoint that a training on a device has to take.

    Without the states of generators that the device does not have, and copies that are kept aside.
    """
    return [
        part
        for one in checkpoint.parts
        for part in _Members(one).parts()
        if not is_kept_aside(part.path) and not _is_of_other_device(part, target.partition(":")[0])
    ]


def values_at(checkpoint: OpenCheckpoint, path: str) -> list[Value]:
    """The values at a path of a checkpoint, in the tree: one at most, unless files have the same name."""
    members = ((one, member) for one in checkpoint.parts for member in entries(one.tree(), one.inventory, one.name))
    return [member.value for one, member in members if one.full_name(member.path).rstrip(".") == path]


def not_taken(who: str, left: Collection[StoredPart], parts: Iterable[StoredPart]) -> list[str]:
    """A sentence about the parts that nothing took; none without one. All parts of a role are named by the role."""
    if not left:
        return []
    all_left = {role for role in ROLES if {one.path for one in parts if one.role == role} <= {one.path for one in left}}
    names = list(
        dict.fromkeys(
            role if role in all_left else part.path or "the file"
            for role in ROLES
            for part in left
            if part.role == role
        )
    )
    named = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    verb, what = ("is", "does not restore it") if len(names) == 1 else ("are", "restores none of them")
    return [f"{named} {verb} in the file; {who} {what}"]


def is_same(now: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether a tensor has the stored values, in its own dtype, bit for bit."""
    if now.shape != stored.shape:
        return False
    pair = (one.to(now.dtype).contiguous().reshape(-1).view(torch.uint8) for one in (now.detach(), stored.detach()))
    return torch.equal(*pair)


def _largest(part: StoredPart) -> list[TensorRecord]:
    return sorted(part.tensors, key=lambda one: -one.nbytes)[:_LOOKED_FOR]


class _Members:
    """The members of a file's tree."""

    def __init__(self, part: OpenPart) -> None:
        self._part = part
        self._records = {record.name: record for record in part.inventory.tensors}
        self._all = entries(part.tree(), part.inventory, part.name)
        self._inside: dict[int, list[int]] = defaultdict(list)
        for index, member in enumerate(self._all[1:], 1):
            self._inside[member.parent].append(index)

    def parts(self) -> Iterator[StoredPart]:
        """The parts of the roles, each the outermost value that one call restores."""
        for index, member in enumerate(self._all):
            outer = self._all[member.parent].role if index else None
            if member.role in ROLES and member.role != outer:
                yield from self._split(index)

    def _split(self, index: int) -> Iterator[StoredPart]:
        """One part, or one for each member of a dict or list that only holds them."""
        member, inside = self._all[index], self._inside[index]
        if member.role != "ema" and inside and not any(self._belongs(member, self._all[one]) for one in inside):
            for one in inside:
                yield from self._split(one)
        elif (part := self._made(index)).atoms or part.tensors:
            yield part

    def _belongs(self, holder: StoredMember, member: StoredMember) -> bool:
        """Whether a member is a value of its holder, and no part by itself: a dict of RNG states holds parts."""
        is_state = holder.role == "rng" and not isinstance(holder.value, Sequence)
        return (member.is_tensor and not is_state) or not isinstance(member.value, Node)

    def _made(self, index: int) -> StoredPart:
        top = self._all[index]
        start = len(top.path) + 1 if index else 0
        atoms: dict[str, object] = {}
        containers: list[str] = [""]
        tensors: list[TensorRecord] = []
        pending = [index]
        for one in pending:  # the list grows
            member = self._all[one]
            path = member.path[start:]
            if member.is_tensor:
                tensors.append(self._records[self._part.full_name(member.path)])
            elif not isinstance(member.value, Node):
                atoms[path] = member.value
            elif path and self._inside[one] and not isinstance(member.value, Sequence):
                containers.append(f"{path}.")
            pending += self._inside[one]
        role: Any = top.role
        return StoredPart(
            self._part.full_name(top.path) if index else self._part.name,
            role,
            top.value,
            atoms,
            tuple(containers),
            tuple(tensors),
        )


def _is_of_other_device(part: StoredPart, kind: str) -> bool:
    """Whether a part holds only states of generators that a kind of device does not have."""
    sizes = {record.nbytes for record in part.tensors}
    if part.role != "rng" or not sizes or max(sizes) > _DEVICE_STATE:
        return False
    return kind == "cpu" or (kind == "mps") != (_MPS_STATE in sizes)


def _has(part: StoredPart, given: Mapping[str, object]) -> bool:
    """Whether values by path contain those of a part, or of a dict in it."""
    return any(_is_like(part, given, start) for start in part.containers)


def _is_like(part: StoredPart, given: Mapping[str, object], start: str = "") -> bool:
    """Whether values by path contain those of a part, or of the dict in it whose paths have a start."""
    inside = {path[len(start) :]: value for path, value in part.atoms.items() if path.startswith(start)}
    own = {path: value for path, value in inside.items() if path.rpartition(".")[2] not in _BOOKKEEPING}
    return bool(own) and all(path in given and given[path] == value for path, value in own.items())


def _leaves(value: object) -> tuple[dict[str, object], list[torch.Tensor]]:
    """The numbers and texts in a value by their path, and its tensors."""
    atoms: dict[str, object] = {}
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", value)]
    for path, one in pending:  # the list grows
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif isinstance(one, (Mapping, list, tuple)):
            if id(one) not in seen:
                seen.add(id(one))
                pairs = one.items() if isinstance(one, Mapping) else enumerate(one)
                pending += [(f"{path}.{key_text(key)}", member) for key, member in pairs]
        elif one is None or isinstance(one, (str, int, float)):
            atoms[path[1:]] = one
    return atoms, tensors
