"""Put the trees of a checkpoint's parts into one tree, with their new devices.

The tree of a directory or an archive is a dict of the path of each part and its tree, as in its inventory.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, cast

from ckptmove.checkpoint.inventory.build import tree_inventory
from ckptmove.checkpoint.inventory.shapes import as_dict, optimizer_state
from ckptmove.checkpoint.merge import split_plan
from ckptmove.conversion.policy import Policy
from ckptmove.conversion.remap.errors import NotRemappable
from ckptmove.errors import UneditablePickle
from ckptmove.formats.facts import facts_of
from ckptmove.pickles.build import new_dict
from ckptmove.pickles.rebuild_arguments import view_of
from ckptmove.pickles.storage_id import rename_storages, set_devices
from ckptmove.pickles.tree import Call, Dict, Global, Persistent, Sequence, Tuple, items_of, nodes
from ckptmove.torch_facts.devices import split

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.limits import Limits
    from ckptmove.moves import MovePlan, MoveRequest
    from ckptmove.pickles.tree import Node, Value

_CODE: Final = "its code relies on the names and dtypes of its tensors"


def combine(checkpoint: OpenCheckpoint, plan: MovePlan, limits: Limits) -> Value:
    """The tree of a checkpoint after its moves. It belongs to the caller; storages are keyed as in the inventory."""
    parts = checkpoint.parts
    plans = (plan,) if checkpoint.is_whole else split_plan(plan, parts)
    trees = [(part.name, _part_tree(part, own, limits)) for part, own in zip(parts, plans, strict=True)]
    return trees[0][1] if checkpoint.is_whole else new_dict(trees)


def _part_tree(part: OpenPart, plan: MovePlan, limits: Limits) -> Value:
    kind = facts_of(part.inventory.container)
    if kind.has_code:
        raise NotRemappable(part.path, part.inventory.container, _CODE)
    root = part.whole_tree()
    if kind.has_devices:
        move_tree(root, plan)
    else:
        _place(root, part, plan.request, limits)
    prefix = f"{part.name}/" if part.name else ""
    found = list(nodes(root))
    if part.is_distributed:
        _number_parameters(found)
    # Only files older than torch 1.6 name the classes of pickled modules by persistent ids.
    for node in found:
        if type(node) is Call and type(node.func) is Persistent and type(node.func.module) is Global:
            node.func = node.func.module
    _write_views_as_offsets(found)
    rename_storages(found, lambda key: prefix + key)
    return root


def _place(root: Value, part: OpenPart, request: MoveRequest, limits: Limits) -> None:
    """Give each storage of a format without devices the device that the policy decides on; by default the CPU."""
    set_devices(root, {})
    if request.to not in {None, "cpu"}:
        inventory = tree_inventory(root, part.path, part.inventory.container, limits, part.inventory.size_bytes)
        policy = Policy(inventory, request)
        set_devices(root, {one.storage: policy.decide(one)[1] for one in inventory.tensors if one.storage is not None})


def _write_views_as_offsets(found: Iterable[Node]) -> None:
    """Add the start of a view of a storage, which torch before 0.4 saved, to the offset of its tensor."""
    for node in found:
        args = node.args if type(node) is Call else None
        if type(node) is Call and type(args) is Tuple and args.items and type(args.items[0]) is Persistent:
            view = view_of(args.items[0])
            if view is not None and type(args.items[1]) is int:
                node.args = Tuple((args.items[0], args.items[1] + view[0], *args.items[2:]), args.starts)


def _number_parameters(found: Iterable[Node]) -> None:
    """Make numbers of the keys of each optimizer's state again, if its groups list numbers.

    ``flatten_state_dict`` of torch.distributed.checkpoint makes text of every key, and ``load_state_dict`` of an
    optimizer then finds none of its state.
    """
    for node in found:
        state = optimizer_state(node) if type(node) is Dict else None
        if type(node) is Dict and state is not None:
            groups = (as_dict(group) for group in items_of(node.get("param_groups")))
            listed = chain.from_iterable(items_of(group.get("params")) for group in groups if group is not None)
            numbers = {str(key): key for key in listed if type(key) is int}
            state.flat[::2] = [numbers.get(key, key) if isinstance(key, str) else key for key in state.flat[::2]]


def move_tree(root: Value, plan: MovePlan) -> None:
    """Set the devices and flags of a plan in the tree of the pickle that it was made for, in place.

    Casts change bytes, and are not applied.
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
            kind, index = split(flag.target)
            pairs[cast("int", mention.site)] = (kind,) if index is None else (kind, index)
        else:
            new[cast("int", mention.site)] = flag.target
    missing = {*new, *pairs} - _set_values(root, new, pairs) if new or pairs else ()
    if missing:
        raise UneditablePickle("a value that moves is not in the tree", offset=min(missing))


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
