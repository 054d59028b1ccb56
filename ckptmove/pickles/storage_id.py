"""The persistent id of a storage: ``('storage', class, key, location, numel)``, of torch/serialization.py.

In a legacy stream, a sixth field may name a view; see :func:`ckptmove.pickles.rebuild_arguments.view_of`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ckptmove.pickles.tree import Persistent, Tuple, nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ckptmove.pickles.tree import Node, Value

#: Indices of the key and of the location, and the number of fields without a view.
KEY: Final = 2
LOCATION: Final = 3
FIELDS: Final = 5


def storage_id(value: Value) -> Tuple | None:
    """The id of a storage; None for any other value."""
    pid = value.pid if type(value) is Persistent else None
    return pid if type(pid) is Tuple and pid.items[:1] == ("storage",) else None


def storage_ids(found: Iterable[Node]) -> Iterator[tuple[Persistent, Tuple]]:
    """The storages among the nodes of a tree, with their ids."""
    for node in found:
        pid = storage_id(node)
        if type(node) is Persistent and pid is not None:
            yield node, pid


def with_key(pid: Tuple, key: str) -> Tuple:
    """The id with another key. Nodes may share an id, so it is copied."""
    return Tuple((*pid.items[:KEY], key, *pid.items[LOCATION:]), pid.starts)


def with_location(pid: Tuple, location: str) -> Tuple:
    """The id with another location."""
    return Tuple((*pid.items[:LOCATION], location, *pid.items[LOCATION + 1 :]), pid.starts)


def prefix_keys(persistents: Iterable[Persistent], prefix: str) -> None:
    """Prefix the keys of storages that are text."""
    for node, pid in storage_ids(persistents):
        if len(pid.items) > KEY and type(key := pid.items[KEY]) is str:
            node.pid = with_key(pid, prefix + key)


def set_devices(root: Value, devices: Mapping[str, str]) -> None:
    """Set the device of each storage, by its key; of all others, the CPU."""
    for node, pid in storage_ids(nodes(root)):
        node.pid = with_location(pid, devices.get(str(pid.items[KEY]), "cpu"))


def rename_storages(found: Iterable[Node], rename: Callable[[str], str]) -> None:
    """Change the keys of storages in the nodes of a tree; a persistent id keeps the five fields of a zip archive."""
    for node, pid in storage_ids(found):
        node.pid = with_key(Tuple(pid.items[:FIELDS], pid.starts[:FIELDS]), rename(str(pid.items[KEY])))


def storage_keys(root: Value) -> dict[str, None]:
    """Keys of the storages in a tree, in the order of the tree."""
    return {str(pid.items[KEY]): None for _, pid in storage_ids(nodes(root))}
