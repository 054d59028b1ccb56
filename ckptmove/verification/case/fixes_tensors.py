"""Fixes for the tensors of a case, by their kind: of the model, the loss, the batch, or the optimizer's state."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.verification.case.edits import Fix, after, before, replaced, with_to
from ckptmove.verification.case.fixes import device_at, is_brought_back, model_first, seen_at, where_made
from ckptmove.verification.case.fixes_attributes import as_buffer, as_container, is_in_container
from ckptmove.verification.case.fixes_moves import where_used
from ckptmove.verification.case.source import assignment_before

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptmove.verification.case.fixes import Scene
    from ckptmove.verification.case.source import Running
    from ckptmove.verification.case.tensor_names import NamedTensor
    from ckptmove.verification.case.watch import Origin

_LOSSES: Final = "criterion"


def of_tensor(
    known: NamedTensor, lineage: Sequence[torch.Tensor], frames: Sequence[Running], root: Origin | None, scene: Scene
) -> Fix:
    """Fix for a tensor of the case.

    Args:
        known: the tensor.
        lineage: the tensor at fault, then those that it was made from; one of them is the tensor of the case.
        frames: frames of the user's code, the innermost last.
        root: origin of the last tensor of the lineage; None if unknown.
        scene: all the rest.
    """
    if known.kind == "attribute":
        if root is not None and id(known.tensor) not in scene.early and scene.early:  # made in the step, and kept
            fix = where_made(root, scene)
            used = None if fix.where else where_used([known.tensor], frames, scene, _of_self(known))
            return fix if used is None else used[1]
        return _of_attribute(known, frames, root, scene)
    if known.kind == "batch":
        return _of_batch(known, lineage, frames, scene)
    if known.kind == "criterion":
        return _of_loss(known, root, scene)
    if known.kind == "state" and root is not None and is_brought_back(root):
        return where_made(root, scene)
    return _of_parameter(known, scene)


def _of_batch(known: NamedTensor, lineage: Sequence[torch.Tensor], frames: Sequence[Running], scene: Scene) -> Fix:
    """Move of a tensor of the batch, or of what contains it, where the step has it."""
    own = lineage[: 1 + next(n for n, one in enumerate(lineage) if one is known.tensor)]
    used = where_used(own, frames, scene)
    words = Fix(f"move {known.name} in the step{seen_at(frames)}: .to(device)")
    return used[1] if used is not None and used[1].where else words


def _of_parameter(known: NamedTensor, scene: Scene) -> Fix:
    """Move of the model of a parameter, or of the state of one; a sentence for one that only the optimizer has."""
    if known.kind == "state" and isinstance(known.tensor, torch.nn.Parameter):
        built = scene.built.get(known.optimizer)
        line = built[0].spot.line if built else scene.home
        return Fix(f"make {known.name} on the device, before the optimizer is built at {line}")
    return model_first(scene, known)


def _of_attribute(known: NamedTensor, frames: Sequence[Running], root: Origin | None, scene: Scene) -> Fix:
    """Fix for an attribute of a module: a buffer, a list of torch's, or a move where it is used."""
    is_one = isinstance(known.held, torch.Tensor)
    fix = as_buffer(known, root) if is_one else None if is_in_container(known) else as_container(known, root)
    if fix is not None:
        return fix
    used = where_used([known.tensor], frames, scene, _of_self(known))
    if used is not None and used[1].where:
        return used[1]
    if is_in_container(known) and not is_one:
        return Fix(f"move {known.name} before it is used{seen_at(frames)}: .to(device)")
    what = "a buffer" if is_one else "a part of the model"
    return Fix(f"make {known.name} {what} where it is first assigned{seen_at(frames)}")


def _of_self(known: NamedTensor) -> str:
    """Expression for a tensor of an attribute in the methods of its module."""
    return f"self.{known.key}{known.name.rpartition(f'.{known.key}')[2]}"


def _of_loss(known: NamedTensor, root: Origin | None, scene: Scene) -> Fix:
    """Move of the whole loss if it is a module; else of its tensor, where that is made."""
    is_module = known.holder is not None
    if not is_module and root is not None:
        fix = where_made(root, scene)
        if fix.where or not root.at_import:
            return fix
    given = scene.given
    below = "" if is_module else known.name.removeprefix(_LOSSES)
    if given is None or given.criterion is None:
        name = known.name if below else _LOSSES
        return Fix(f"{name} = {name}.to(device){scene.in_case}")
    name = ast.unparse(given.criterion)
    built = assignment_before(given.statement, name)
    device = device_at(built or given.statement, given, scene)
    text = f"{name}{below} = {name}{below}.to({device})"
    if built is not None:
        fix = after(given.path, built, text)
        return fix if fix.where else before(given.path, given.statement, text)
    if is_module:
        return replaced(given.path, (given.criterion, with_to(given.path, given.criterion, device)))
    return Fix(f"make {known.name} on the device passed to the function, for {given.line}")
