"""Find the schedulers, scalers, EMAs and RNG states of a checkpoint, and note which of them a training takes.

The values decide, not the names or the functions: a part is taken if a call that restores is given its values, or if an
object of the training has them at the step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckptmove.checkpoint.entries import entries
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text, string_keys
from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.pickles.tree import Node, Sequence
from ckptmove.proof.equality import has_values
from ckptmove.proof.step.trial import STEP_ERRORS
from ckptmove.training.case.options import is_equal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from ckptmove.checkpoint.entries import StoredMember
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.model import Role, TensorRecord
    from ckptmove.pickles.tree import Value
    from ckptmove.proof.place import StepDevice

#: Roles of the parts, in the order of the report.
ROLES: Final[tuple[Role, ...]] = ("scaler", "scheduler", "ema", "rng")
#: Roles whose tensors are their values; the others are numbers.
_OF_TENSORS: Final = frozenset({"ema", "rng"})
#: Keys of a scheduler that do not change its learning rates: one that is built at the stored epoch has other values.
_BOOKKEEPING: Final = frozenset({"_step_count", "_get_lr_called_within_step", "_is_initial", "verbose"})
#: The state of a device's generator is at most so long, and that of mps exactly; that of the CPU is far longer.
_DEVICE_STATE: Final = 64
_MPS_STATE: Final = 44
#: Classes of torch whose objects show by their state_dict whether they have the values of a part.
_KINDS: Final[Mapping[str, type]] = {"scheduler": LRScheduler, "scaler": torch.amp.GradScaler}
#: Libraries with an RNG state of their own.
SOURCES: Final = ("torch", "random", "numpy")


class StoredPart(NamedTuple):
    """A part of a checkpoint that a resume needs, besides models and optimizers."""

    path: str  # its path in the checkpoint
    role: Role
    value: Value  # its value in the tree
    atoms: Mapping[str, object]  # its numbers and texts by their path in it
    containers: tuple[str, ...]  # paths in it of the part itself and of its dicts, each with a dot at the end
    tensors: tuple[TensorRecord, ...]


class _Take(NamedTuple):
    part: StoredPart
    receiver: weakref.ref[Any] | None  # the object that took it; None for the state of a library
    source: str  # the library whose function took it (`SOURCES`); empty for none

    @property
    def is_valid(self) -> bool:
        """Whether the object that took it still exists."""
        return self.receiver is None or self.receiver() is not None


class Taking:
    """The parts of a checkpoint that a training has not taken so far."""

    def __init__(
        self, parts: Iterable[StoredPart], tensor: Callable[[TensorRecord], torch.Tensor], place: StepDevice
    ) -> None:
        self.parts = tuple(parts)
        self._tensor = tensor
        self._place = place
        self._takes: list[_Take] = []
        #: Values that schedulers and scalers were given. An object and the one that it wraps are given the same.
        self._given: list[object] = []

    @property
    def left(self) -> list[StoredPart]:
        """The parts that were not taken, or whose takers no longer exist."""
        taken = {one.part.path for one in self._takes if one.is_valid}
        return [one for one in self.parts if one.path not in taken]

    def note(self, value: object, receiver: object = None, source: str = "") -> None:
        """Note the argument of a call that restores something, and the object that takes it; None for a function."""
        left = self.left
        if not left:
            return
        atoms, tensors = _leaves(value)
        equal = [one for one in left if self._equals(one, atoms, tensors) and accepts(receiver, one)]
        states = [one for one in equal if one.role not in _OF_TENSORS]
        if states and all(value is not one for one in self._given):  # equal states of two schedulers need two calls
            self._given.append(value)
            self._take(states[0], receiver, source)
        for one in equal:
            if one.role in _OF_TENSORS:
                self._take(one, receiver, source)

    def forget(self, source: str) -> None:
        """Note that a library was seeded, which undoes the restore of its RNG states."""
        self._takes = [one for one in self._takes if one.source != source]

    def note_live(
        self,
        live: Callable[[type[Any]], list[Any]],
        tensors: Callable[[], Iterable[weakref.ref[torch.Tensor]]],
        is_idle: Callable[[torch.Tensor], bool],
    ) -> None:
        """Note parts whose values objects of the training have at its step, in tensors that are not idle.

        References to tensors that are not weak would look like those of the training.
        """
        for role, kind in _KINDS.items():
            for one in live(kind) if any(part.role == role for part in self.left) else ():
                part = next((part for part in self.left if part.role == role and _holds(one, part)), None)
                if part is not None and not any(each.receiver and each.receiver() is one for each in self._takes):
                    self._take(part, one, "")
        if any(part.role == "ema" for part in self.left):
            known = [*tensors()]
            for part in self.left:
                if part.role == "ema" and self._is_held(part, known, is_idle):
                    self._take(part, None, "")

    def _take(self, part: StoredPart, receiver: object, source: str) -> None:
        weak: weakref.ref[Any] | None = None
        with suppress(TypeError):  # some objects have no weak references
            weak = None if receiver is None else weakref.ref(receiver)
        self._takes.append(_Take(part, weak, source))

    def _equals(self, part: StoredPart, atoms: Mapping[str, object], tensors: Collection[torch.Tensor]) -> bool:
        if part.role != "ema" and _has(part, atoms):
            return True
        if not part.tensors or (part.atoms and part.role not in _OF_TENSORS):
            return False
        found = (any(self._is_same(one, record) for one in tensors) for record in part.tensors)
        return all(found) if part.role == "ema" else any(found)  # a machine may have fewer devices than states

    def _is_held(
        self,
        part: StoredPart,
        known: Collection[weakref.ref[torch.Tensor]],
        is_idle: Callable[[torch.Tensor], bool],
    ) -> bool:
        """Whether the training holds the tensors of a part."""
        by_shape: dict[tuple[int, ...], list[weakref.ref[torch.Tensor]]] = defaultdict(list)
        for weak in known:
            if (one := weak()) is not None and is_readable(one):
                by_shape[tuple(one.shape)].append(weak)
        return all(
            any(
                (one := weak()) is not None and self._is_same(one, record) and not is_idle(one)
                for weak in by_shape[record.shape]
            )
            for record in part.tensors
        )

    def _is_same(self, now: torch.Tensor, record: TensorRecord) -> bool:
        if not is_readable(now) or tuple(now.shape) != record.shape:
            return False
        values, stored = self._place.to_cpu(now), self._tensor(record)
        with torch._C.DisableTorchFunction():  # the record of the script's calls would keep the intermediate tensors
            return has_values(values, stored)


def accepts(receiver: object, part: StoredPart) -> bool:
    """Whether an object that was given the state of a part has it now, as far as torch's own classes show it."""
    kind = _KINDS.get(part.role)
    return kind is None or not isinstance(receiver, kind) or _holds(receiver, part)


def _holds(one: Any, part: StoredPart) -> bool:
    """Whether a scheduler or a scaler of torch has the values of a part, and no option that the part lacks."""
    with suppress(*STEP_ERRORS):
        state = one.state_dict()
        stored = as_dict(part.value)
        keys = state if stored is None else string_keys(stored)
        is_of_class = all(key in keys for key in state if not str(key).startswith("_"))
        return is_of_class and _is_like(part, _leaves(state)[0])
    return False


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor can be copied: it is dense, and its memory is there."""
    host = getattr(tensor, "host", tensor)  # of a simulated tensor
    is_dense = host.layout is torch.strided and not (host.is_quantized or host.is_nested or host.is_meta)
    if not is_dense or type(host) not in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        return False
    reach = 1 + sum((size - 1) * step for size, step in zip(host.shape, host.stride(), strict=True))
    extent = (host.storage_offset() + reach) * host.element_size() if host.numel() else 0
    return extent <= host.untyped_storage().nbytes()  # FSDP frees the memory of gathered parameters


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


class _Members:
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
    """Whether values by path contain those of a part, or of a dict in it that has all numbers of the part."""
    numbers = [path for path, value in part.atoms.items() if _is_kept(path) and isinstance(value, (int, float))]
    return any(
        _is_like(part, given, start) for start in part.containers if all(path.startswith(start) for path in numbers)
    )


def _is_kept(path: str) -> bool:
    return path.rpartition(".")[2] not in _BOOKKEEPING


def _is_like(part: StoredPart, given: Mapping[str, object], start: str = "") -> bool:
    """Whether values by path contain those of a part, or of the dict in it whose paths have a start."""
    inside = {path[len(start) :]: value for path, value in part.atoms.items() if path.startswith(start)}
    own = {path: value for path, value in inside.items() if _is_kept(path)}
    return bool(own) and all(path in given and is_equal(given[path], value) for path, value in own.items())


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
