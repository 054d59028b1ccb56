"""What mends a case that was not stepped at all, or was stepped with more on the target than it needs.

Never looks at tensors: only at what the user's file says, and which keys of the model have no counterpart.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ckptmove.verification.user_code import callee, line_of, own_nodes, written_in
from ckptmove.verification.user_code_edits import NO_FIX, Fix, before, replaced, text_of
from ckptmove.verification.user_code_names import given_to_case, set_before

if TYPE_CHECKING:
    from torch import nn

    from ckptmove.verification.user_code import Entrance, Line

_MISSING: Final = re.compile(r"missing ([^\s;]+)")
_UNSAVED: Final = (
    "what was not registered when it was saved is not in the checkpoint: load the rest with strict=False, "
    "begin the optimizer anew, train and save again"
)


def built_again(home: Line, *others: Line) -> Fix:
    """The optimizer once more, where all its parameters are the model's."""
    given = given_to_case(home, *others)
    built = None if given is None else set_before(given.line, given.optimizer)
    if given is None or built is None:
        return Fix(
            "build the optimizer after model = model.to(device), and after whatever else replaces its parameters"
        )
    return before(given.line, text_of(given.line, built))


def as_batch(home: Line) -> Fix:
    """The first batch of a dataset in its place."""
    given = given_to_case(home)
    if given is None or given.batch is None:
        return Fix("batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8)))")
    loader = f"next(iter(torch.utils.data.DataLoader({text_of(given.line, given.batch)}, batch_size=8)))"
    if isinstance(given.batch, ast.Name) and set_before(given.line, given.batch) is not None:
        return before(given.line, f"{given.batch.id} = {loader}")
    return replaced(given.line, (given.batch, loader))


def unmoved(line: Line) -> Fix:
    """A line that moves a whole dataset, without the move: what is taken of it is to be moved."""
    for node in own_nodes(line):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and callee(node) in {"to", "cuda"}:
            return replaced(line, (node, text_of(line, node.func.value)))
    return Fix("move a batch at a time, in the loop: batch = batch.to(device)")


def unsaved(error: Exception, model: nn.Module, entrance: Entrance) -> Fix:
    """What there is to do where a checkpoint only lacks something: it was saved before that was registered."""
    text = str(error)
    missing = _MISSING.findall(text)
    if not missing or "unexpected " in text:
        return NO_FIX
    buffers = {name for name, _ in model.named_buffers()}
    for key in missing:
        owner, _, name = key.rpartition(".")
        for line, node in written_in(type(model.get_submodule(owner))) if key in buffers else ():
            if entrance.is_own(line.path) and isinstance(node, ast.Call) and _registers(node, name):
                where = line_of(line.path, node.lineno)
                return replaced(where, (node, f"{text_of(where, node)[:-1].rstrip(', ')}, persistent=False)"))
    return Fix(_UNSAVED)


def _registers(call: ast.Call, name: str) -> bool:
    return callee(call) == "register_buffer" and any(
        isinstance(one, ast.Constant) and one.value == name for one in call.args
    )
