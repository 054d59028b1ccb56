"""Fixes for a case that made no step: a stale optimizer, a whole dataset, tensors that the checkpoint lacks."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ckptmove.training.code.source import (
    assigned,
    assignment_before,
    callee,
    function_of,
    name_of_module,
    nodes_of_class,
    read,
    stored,
)
from ckptmove.training.fixes.edits import MOVES, NO_FIX, Fix, before, replaced, text_of
from ckptmove.training.fixes.tensors import is_updated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from ckptmove.training.code.calls import Given, UserFrame
    from ckptmove.training.code.entrance import Entrance
    from ckptmove.training.code.source import Line, Spot

_MISSING: Final = re.compile(r"missing ([^\s;]+)")
_UNSAVED: Final = (
    "values that were not registered when saved are not in the checkpoint: load the rest with strict=False, "
    "start with a new optimizer, train and save again"
)
_REBUILT: Final = (
    "build the optimizer after model = model.to(device), and after any other line that replaces its parameters"
)


def built_again(given: Given | None, built: Sequence[UserFrame], home: Line) -> Fix:
    """The statement that built the optimizer, once more before the call of ``Case``."""
    if given is None or given.model is None:
        return Fix(f"{_REBUILT}, in the case at {home}")
    for frame in built:
        statement = frame.spot.statement
        if frame.spot.code is given.frame.spot.code and statement is not None and _is_fresh(statement, given, frame):
            return before(given.path, given.statement, text_of(given.path, statement))
    name = ast.unparse(given.model)
    return Fix(f"{_REBUILT}: build it again before {given.line}, from {name}.parameters()")


def _is_fresh(statement: ast.stmt, given: Given, frame: UserFrame) -> bool:
    """Whether a statement, run again, builds the optimizer of the model's present parameters, and leaves the model."""
    target, value = assigned(statement)
    model, optimizer = given.model, given.optimizer
    if target is None or value is None or model is None or not isinstance(optimizer, ast.Name):
        return False
    if ast.unparse(target) != optimizer.id or not read(model).isdisjoint(stored(statement)):
        return False
    reads_model = any(isinstance(one, ast.expr) and ast.unparse(one) == ast.unparse(model) for one in ast.walk(value))
    return reads_model and frame.tensors.isdisjoint(read(value))


def as_batch(given: Given | None, home: Line) -> Fix:
    """The first batch of a dataset in place of the dataset."""
    if given is None or given.batch is None:
        return Fix(f"batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8))), in the case at {home}")
    own = name_of_module(given.path, "torch")
    name = own or "torch"
    batch = text_of(given.path, given.batch)
    loader = f"next(iter({name}.utils.data.DataLoader({batch}, batch_size=8)))"
    if isinstance(given.batch, ast.Name) and assignment_before(given.statement, given.batch.id) is not None:
        brought = "" if own else "import torch; "
        return before(given.path, given.statement, f"{brought}{batch} = {loader}")
    if not own:
        return Fix(f"import torch, and give {loader} in place of {batch}, at {given.line}")
    return replaced(given.path, (given.batch, loader))


def unmoved(spot: Spot) -> Fix:
    """A line that moves a whole dataset, without that move."""
    call, path = spot.node, spot.line.path
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in MOVES:
        return replaced(path, (call, text_of(path, call.func.value)))
    return Fix("move a batch at a time, in the loop: batch = batch.to(device)")


def unsaved(error: Exception, model: nn.Module, entrance: Entrance) -> Fix:
    """Fix for a checkpoint that lacks tensors of the model: it was saved before they were registered."""
    text = str(error)
    missing = _MISSING.findall(text)
    if not missing or "unexpected " in text:
        return NO_FIX
    buffers = {name for name, _ in model.named_buffers()}
    for key in missing:
        owner, _, name = key.rpartition(".")
        every = list(nodes_of_class(type(model.get_submodule(owner)))) if key in buffers else []
        for path, node in every:
            given = node.args if callee(node) == "register_buffer" and entrance.is_own(path) else []
            is_named = any(isinstance(one, ast.Constant) and one.value == name for one in given)
            if is_named and not is_updated(name, [one for _, one in every], function_of(node)):
                return replaced(path, (node, f"{text_of(path, node)[:-1].rstrip(', ')}, persistent=False)"))
    return Fix(_UNSAVED)
