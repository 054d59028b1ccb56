"""Rebuild the groups of an optimizer, and the state of one parameter from paths, as in the inventory."""

from __future__ import annotations

from contextlib import suppress
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ckptmove.model import OPAQUE, TensorRecord
from ckptmove.proof.loading.objects import REJECTED, NotAllowed
from ckptmove.proof.loading.values import built, values_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.limits import Limits
    from ckptmove.model import OptimizerRecord, ParamGroup, StateEntry

    #: A tensor option, or a tuple of tensors (``betas``).
    TensorOption: TypeAlias = TensorRecord | list[TensorRecord]

_KINDS: Final = frozenset({"dict", "list", "tuple"})


def foreign_kind(entry: StateEntry) -> str:
    """Path and kind of the first member that cannot be rebuilt; empty if all can."""
    return next((f"{path} ({kind})".lstrip() for path, kind in entry.nested if kind not in _KINDS), "")


def nested_state(entry: StateEntry, tensors: Mapping[str, object]) -> dict[Any, object]:
    """Rebuild an entry as its optimizer keeps it. Only dicts, lists and tuples are rebuilt; others are left out."""
    kinds, keys = dict(entry.nested), dict(entry.keys)
    members: dict[str, dict[Any, object]] = {path: {} for path in ("", *kinds)}
    for path, value in (*entry.scalars, *tensors.items()):
        parent, key = _split(path, kinds)
        members[parent][keys.get(path, key)] = value
    for path, kind in reversed(entry.nested):
        parent, key = _split(path, kinds)
        if kind in _KINDS:
            members[parent][keys.get(path, key)] = _made(kind, members[path])
    return members[""]


class StoredGroup(NamedTuple):
    """The options of a group in the file."""

    options: dict[str, Any]  # options without tensors
    tensors: dict[str, TensorOption]  # options that are tensors or tuples of tensors, for example a tensor ``lr``
    left_out: tuple[str, ...]  # options that only unpickling could rebuild


def stored_groups(optimizer: OptimizerRecord, checkpoint: OpenCheckpoint, limits: Limits) -> list[StoredGroup]:
    """The groups of an optimizer. Options that are objects are built as ``load`` builds them."""
    tensors = checkpoint.inventory.tensors
    records = {record.name: record for record in tensors if ".param_groups." in f".{record.name}"}
    of_tensors = [_tensor_options(group, records) for group in optimizer.groups]
    pairs = [*zip(optimizer.groups, of_tensors, strict=True)]
    objects = {
        f"{group.where}.{key}"
        for group, own in pairs
        for key, value in group.options
        if value is OPAQUE and key not in own
    }
    made: dict[str, Any] = {}
    for path, value in values_at(checkpoint, objects).items():
        with suppress(NotAllowed, *REJECTED):
            made[path] = built(checkpoint, value, limits.depth)
    found = []
    for group, own in pairs:
        plain = {key: made.get(f"{group.where}.{key}", value) for key, value in group.options if key not in own}
        left_out = tuple(key for key, value in plain.items() if value is OPAQUE)
        found.append(StoredGroup({key: plain[key] for key in plain if key not in left_out}, own, left_out))
    return found


def _tensor_options(group: ParamGroup, records: Mapping[str, TensorRecord]) -> dict[str, TensorOption]:
    found: dict[str, TensorOption] = {}
    for key, _ in group.options:
        path = f"{group.where}.{key}"
        items = [records[item] for item in takewhile(records.__contains__, (f"{path}.{n}" for n in count()))]
        if path in records:
            found[key] = records[path]
        elif items:
            found[key] = items
    return found


def tensors_of(option: TensorOption) -> list[TensorRecord]:
    """Tensors of an option."""
    return [option] if isinstance(option, TensorRecord) else option


def each_tensor(option: TensorOption, convert: Callable[[TensorRecord], Any]) -> Any:
    """Convert each tensor of an option, and return the option in the optimizer's form (a tuple for several)."""
    return convert(option) if isinstance(option, TensorRecord) else tuple(map(convert, option))


def leaves(state: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of a state by path; dicts, lists and tuples of any class are opened.

    A ``torch.Size`` is opened too; nothing reads its numbers.
    """
    found: dict[str, Any] = {}
    stack = [iter(state.items())]
    while stack:
        for path, value in stack[-1]:
            if isinstance(value, (dict, list, tuple)):
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                stack.append(iter([(f"{path}.{key}", member) for key, member in pairs]))
                break
            found[str(path)] = value
        else:
            stack.pop()
    return found


def _split(path: str, kinds: Mapping[str, str]) -> tuple[str, str]:
    """Split a path into its innermost container and the key in it; a key may contain dots."""
    parent = path.rpartition(".")[0]
    while parent and not _holds(kinds.get(parent), path[len(parent) + 1 :]):
        parent = parent.rpartition(".")[0]
    return parent, path[len(parent) + 1 :] if parent else path


def _holds(kind: str | None, key: str) -> bool:
    """Whether a container can have a key: ``al.key`` is a key of its own if ``al`` is a list."""
    return kind is not None and (kind not in {"list", "tuple"} or key.isdecimal())


def _made(kind: str, members: dict[Any, object]) -> object:
    if kind == "dict":
        return members
    items = [members[key] for key in sorted(members, key=int)]
    return items if kind == "list" else tuple(items)
