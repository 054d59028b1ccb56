"""Distinguish tensors whose paths have the same text, for example under the keys ``0`` and ``"0"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from ckptmove.checkpoint.inventory.objects import module_attributes, object_members, plain_members, registered_members
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text, unique
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import Call, Persistent, Sequence

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckptmove.checkpoint.inventory.budget import Budget
    from ckptmove.model import TensorRecord
    from ckptmove.pickles.tree import Value

#: The keys of a tensor's path, each with its type before it; the type is empty for indices and attributes.
Spelling: TypeAlias = tuple[str, ...]


def spellings(
    root: Value, names: Collection[str], tensors: Collection[TensorRecord], budget: Budget
) -> dict[int, Spelling]:
    """Return the spellings of tensors with ambiguous names, by the ``id`` of their records.

    Tensors in dicts, lists and modules have one; those inside other objects may have none.
    """
    found: dict[tuple[object, ...], list[Spelling]] = {}
    reader = TensorReader()
    for name, spelling, node in _named_tensors(root, names, reader, budget):
        record = reader.tensor(node, name, "other") if isinstance(node, Call) else reader.storage(node, name, "other")
        if record is not None:
            budget.spend(len(record.shape))
            found.setdefault(_identity(record), []).append(spelling)
    by_record = {}
    for record in tensors:
        rest = found.get(_identity(record))
        if rest:
            by_record[id(record)] = rest.pop(0)
    return by_record


def _named_tensors(
    root: Value, names: Collection[str], reader: TensorReader, budget: Budget
) -> Iterator[tuple[str, Spelling, Call | Persistent]]:
    """Iterate over the tensors with these names in the order of the tree; cycles end at the longest name."""
    parents = _parents(names, budget)
    entered: set[tuple[int, str | None]] = set()
    stack: list[tuple[str | None, Spelling, Value]] = [(None, (), root)]  # None for the root, as a key may be empty
    while stack:
        name, spelling, node = stack.pop()
        if (
            name is not None
            and name in names
            and (isinstance(node, Persistent) or (isinstance(node, Call) and reader.is_tensor(node)))
        ):
            yield name, spelling, node
        elif name is None or name in parents:
            if isinstance(node, Call) and as_dict(node) is None and module_attributes(node) is None:
                if (id(node), name) in entered:
                    continue  # a graph of objects has more paths than objects; the inventory lists one path of each
                entered.add((id(node), name))
            prefix = "" if name is None else f"{name}."
            members = []
            for key, kind, value in _typed_members(node):
                budget.spend(1)
                budget.write(len(prefix) + len(key))
                if prefix + key in parents or prefix + key in names:
                    members.append((prefix + key, (*spelling, f"{kind} {key}"), value))
            stack += reversed(members)


def _parents(names: Collection[str], budget: Budget) -> set[str]:
    """Return the prefixes of all names, up to each dot."""
    parents = set()
    for name in names:
        for place, letter in enumerate(name):
            if letter == ".":
                budget.write(place)
                parents.add(name[:place])
    return parents


def _typed_members(node: Value) -> Iterator[tuple[str, str, Value]]:
    """Iterate over the members of a node: name, type of the key, value."""
    if isinstance(node, Sequence):
        yield from ((str(place), "", item) for place, item in enumerate(node.items))
        return
    pairs = as_dict(node)
    if pairs is not None:
        yield from ((key_text(key), type(key).__name__, value) for key, value, _ in unique(pairs))
    elif isinstance(node, Call):
        module = module_attributes(node)
        if module is None:
            yield from ((key, "", value) for key, value, _ in object_members(node))
        else:
            yield from ((key, "", value) for key, value, _ in (*registered_members(module), *plain_members(module)))


def _identity(record: TensorRecord) -> tuple[object, ...]:
    """Return the fields that identify a tensor in its tree; views of the same elements are equal."""
    return record.name, record.storage, record.storage_offset, record.shape, record.stride
