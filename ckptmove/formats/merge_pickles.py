"""Merge the trees of several pickles into one tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.pickles.tree import Call, Dict, Node, Persistent, Sequence, Tuple, nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value


def merge(machine: Machine, inner: Machine) -> None:
    """Add the results of one machine to another; both have read pickles of the same bytes."""
    machine.reads += inner.reads
    machine.reread |= inner.reread
    machine.frames += inner.frames
    machine.persistents += inner.persistents
    machine.stacked |= inner.stacked
    machine.note_names(inner)
    machine.excess = inner.excess
    machine.end = inner.end


def replace_nodes(machine: Machine, new: Mapping[int, Value]) -> None:
    """Replace nodes of the tree."""

    def change(value: Value) -> Value:
        return new.get(id(value), value)

    machine.root = replace_values(machine.root, change)


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
