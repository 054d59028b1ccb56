"""Several pickles as one tree: what others stand for, put into the places where the first one names it.

Never reads a pickle: it joins what machines have read of one run of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptmove.pickles.tree import Call, Dict, Node, Persistent, Sequence, Tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ckptmove.pickles.state import Machine
    from ckptmove.pickles.tree import Value


def merge(machine: Machine, inner: Machine) -> None:
    """Make a machine know what another one has read of the same run of bytes.

    Args:
        machine: the machine that has read the first pickle.
        inner: the one that has read another pickle.
    """
    machine.reads += inner.reads
    machine.reread |= inner.reread
    machine.frames += inner.frames
    machine.persistents += inner.persistents
    machine.stacked |= inner.stacked
    machine.note_names(inner)
    machine.excess = inner.excess
    machine.end = inner.end


def replace_nodes(machine: Machine, new: Mapping[int, Value]) -> None:
    """Put other values into the places of nodes of the tree, which are named by their ``id``."""

    def change(value: Value) -> Value:
        return new.get(id(value), value)

    for node in list(nodes(machine.root)):
        _replace(node, change)
    machine.root = change(machine.root)


def nodes(root: Value) -> Iterator[Node]:
    """Every node of a tree, once."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, Node) and id(node) not in seen:
            seen.add(id(node))
            yield node
            stack += node.members()


def _replace(node: Node, change: Callable[[Value], Value]) -> None:
    """Put other values in the places of a node's own."""
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
