"""Apply the moves of a plan to a tree, instead of to the bytes of its pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ckptmove.errors import UneditablePickle
from ckptmove.pickles.tree import Dict, Sequence, Tuple, nodes
from ckptmove.torch_facts.devices import split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptmove.moves import MovePlan
    from ckptmove.pickles.tree import Value


def move_tree(root: Value, plan: MovePlan) -> None:
    """Set the devices of a plan in a tree, in place.

    Args:
        root: the tree of the pickle that the plan was made for.
        plan: its changes of devices and flags; casts change bytes, and are not applied.

    Raises:
        UneditablePickle: if a value that the plan changes is not in the tree.
    """
    new: dict[int, Value] = {}
    pairs: dict[int, tuple[Value, ...]] = {}
    for edit in plan.edits:
        if edit.target != edit.source:
            new.update(dict.fromkeys(edit.sites, edit.target))
    for flag in plan.flags:
        mention = flag.mention
        if mention is None:
            new[cast("int", flag.site)] = flag.target == "True"
        elif mention.kind == "torch.device":
            pairs[cast("int", mention.site)] = _device_arguments(flag.target)
        else:
            new[cast("int", mention.site)] = flag.target
    missing = {*new, *pairs} - _set_values(root, new, pairs) if new or pairs else ()
    if missing:
        raise UneditablePickle("a value that moves is not in the tree", offset=min(missing))


def _device_arguments(tag: str) -> tuple[Value, ...]:
    """Arguments of ``torch.device``: the type, and the index if the tag has one."""
    kind, index = split(tag)
    return (kind,) if index is None else (kind, index)


def _set_values(root: Value, new: Mapping[int, Value], pairs: Mapping[int, tuple[Value, ...]]) -> set[int]:
    """Replace values by the start of the operation that pushed them; return the starts that were found."""
    found: set[int] = set()
    for node in list(nodes(root)):
        if isinstance(node, Sequence | Dict):
            places = [place for place, start in enumerate(node.starts) if start in new]
            found.update(node.starts[place] for place in places)
            if type(node) is Tuple:
                first = node.starts[0] if node.starts else -1
                if first in pairs:
                    found.add(first)
                    node.items, node.starts = pairs[first], (first,) * len(pairs[first])
                elif places:
                    node.items = tuple(
                        new.get(start, item) for start, item in zip(node.starts, node.items, strict=True)
                    )
            else:
                values = node.flat if isinstance(node, Dict) else cast("list[Value]", node.items)
                for place in places:
                    values[place] = new[node.starts[place]]
    return found
