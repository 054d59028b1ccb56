"""Join the parts of a checkpoint of Megatron-Core: tensors in a distributed checkpoint, options in ``common.pt``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptmove.checkpoint.inventory.megatron import FlatBuckets, megatron_optimizers, stored_options
from ckptmove.checkpoint.inventory.shapes import as_dict
from ckptmove.checkpoint.naming import naming
from ckptmove.checkpoint.trainers import MEGATRON_COMMON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.checkpoint.parts import OpenPart
    from ckptmove.pickles.tree import Dict


def join_optimizers(parts: Sequence[OpenPart]) -> None:
    """Give each distributed checkpoint next to a ``common.pt`` its optimizers."""
    by_name = {part.name: part for part in parts}
    for part in parts:
        prefix = f"{part.name}/" if part.name else ""
        common = by_name.get(prefix + MEGATRON_COMMON)
        if common is None or part.inventory.container != "dcp" or part.inventory.optimizers:
            continue
        with naming(common.path):
            stored = stored_options(common.tree(), common.name, common.budget().spend)
        tensors = {part.own_name(one.name): one for one in part.inventory.tensors}
        steps = {one.name: one for one in common.inventory.tensors}
        flat = FlatBuckets(partial(_content, part), part.budget().spend)
        found = megatron_optimizers(part.full_name(""), tensors, part.inventory.root_keys, stored, steps, flat)
        part.inventory = replace(part.inventory, optimizers=found)
        if found:
            # With a common step count, its dict looks like that of an optimizer.
            common.inventory = replace(common.inventory, optimizers=())


def _content(part: OpenPart) -> Dict | None:
    return as_dict(part.tree())
