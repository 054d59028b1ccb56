"""Replace values of a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.pickles.tree import Call, Dict, Node, Persistent, Sequence, Tuple, nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value


def replace_nodes(machine: Machine, new: Mapping[int, Value]) -> None:
    """Replace nodes of the tree, by their ``id``."""
    machine.root = replace_values(machine.root, lambda value: new.get(id(value), value))


def replace_values(root: Value, change: Callable[[Value], Value]) -> Value:
    """Replace the values of a tree, its root too, by what a function returns for each."""
    for node in list(nodes(root)):
        _replace(node, change)
    return change(root)


def _replace(node: Node, change: Callable[[Value], Value]) -> None:
    if isinstance(node, Tuple):
        node.items = tuple(map(change, node.items))
    elif isinstance(node, Sequence):
        node.items = list(map(change, node.items))
    elif type(node) is Dict:
        node.flat = list(map(change, node.flat))
    elif type(node) is Call:
        node.func, node.args = change(node.func), change(node.args)
        node.kwargs, node.state = change(node.kwargs), change(node.state)
    elif type(node) is Persistent:
        node.pid = change(node.pid)
