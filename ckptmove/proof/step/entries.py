"""Convert the state of one parameter between paths, as in the inventory, and the nested state of an optimizer."""

from __future__ import annotations

from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptmove.model import TensorRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptmove.model import ParamGroup, StateEntry

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


def tensor_options(group: ParamGroup, records: Mapping[str, TensorRecord]) -> dict[str, TensorOption]:
    """Options of a group that are tensors or tuples of tensors."""
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
