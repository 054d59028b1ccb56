"""How the names of tensors are spelled in the tree, where two read alike: the key 0 and the key ``"0"``, say.

Never goes where no such name leads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from ckptmove.checkpoint.inventory.objects import module_attributes, object_members, plain_members, registered_members
from ckptmove.checkpoint.inventory.shapes import as_dict, key_text, unique
from ckptmove.pickles.tensors import TensorReader
from ckptmove.pickles.tree import Call, Persistent, Sequence

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ckptmove.checkpoint.inventory.budget import Budget
    from ckptmove.model import TensorRecord
    from ckptmove.pickles.tree import Value

#: The keys that lead to a tensor, each after its type; the type of what is no key of a dict is empty.
Spelling: TypeAlias = tuple[str, ...]


def spellings(
    root: Value, names: Collection[str], tensors: Collection[TensorRecord], budget: Budget
) -> dict[int, Spelling]:
    """How the names of some tensors are spelled, by the identity of their records.

    Args:
        root: of the tree that they are in.
        names: those that read alike.
        tensors: those of these names, in the terms of the tree, each by itself.
        budget: what the pickle may ask for.

    Returns:
        The spellings of those that dicts, lists and modules lead to; nothing for those deeper inside of other objects.

    Raises:
        LimitExceeded: too many paths of the tree read like these names, or too long ones.
    """
    found: dict[tuple[object, ...], list[Spelling]] = {}
    reader = TensorReader()
    for name, spelling, node in _leaves(root, names, reader, budget):
        record = reader.tensor(node, name, "other") if isinstance(node, Call) else reader.storage(node, name, "other")
        if record is not None:
            budget.spend(len(record.shape))
            found.setdefault(_identity(record), []).append(spelling)
    told = {}
    for record in tensors:
        rest = found.get(_identity(record))
        if rest:
            told[id(record)] = rest.pop(0)
    return told


def _leaves(
    root: Value, names: Collection[str], reader: TensorReader, budget: Budget
) -> Iterator[tuple[str, Spelling, Call | Persistent]]:
    """What stands under the names, in the order of the tree; a circle ends where no name is that long."""
    parents = _parents(names, budget)
    entered: set[tuple[int, str | None]] = set()
    stack: list[tuple[str | None, Spelling, Value]] = [(None, (), root)]  # a key may be empty, and the root has none
    while stack:
        name, spelling, node = stack.pop()
        if name is not None and name in names and _is_leaf(node, reader):
            yield name, spelling, node
        elif name is None or name in parents:
            if isinstance(node, Call) and as_dict(node) is None and module_attributes(node) is None:
                if (id(node), name) in entered:
                    continue  # a graph of objects has more paths than objects; the inventory knows each by one alone
                entered.add((id(node), name))
            prefix = "" if name is None else f"{name}."
            members = []
            for key, kind, value in _members(node):
                budget.spend(1)
                budget.write(len(prefix) + len(key))
                if prefix + key in parents or prefix + key in names:
                    members.append((prefix + key, (*spelling, f"{kind} {key}"), value))
            stack += reversed(members)


def _parents(names: Collection[str], budget: Budget) -> set[str]:
    """What the names begin with, up to any of their dots."""
    parents = set()
    for name in names:
        for place, letter in enumerate(name):
            if letter == ".":
                budget.write(place)
                parents.add(name[:place])
    return parents


def _is_leaf(node: Value, reader: TensorReader) -> TypeGuard[Call | Persistent]:
    return isinstance(node, Persistent) or (isinstance(node, Call) and reader.is_tensor(node))


def _members(node: Value) -> Iterator[tuple[str, str, Value]]:
    """Name, type of the key, and value of each member."""
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
    """What tells a tensor from every other one of its tree; views of all the same elements are one."""
    return record.name, record.storage, record.storage_offset, record.shape, record.stride
