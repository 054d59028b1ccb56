"""What mends a case that was not stepped at all, or was stepped with more on the target than it needs.

Never looks at tensors: only at what the user's file says, and which keys of the model have no counterpart.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ckptmove.verification.case.user_code import (
    SCOPES,
    assigned,
    called,
    callee,
    imported,
    line_of,
    statements_at,
    written_in,
)
from ckptmove.verification.case.user_code_bindings import read_in, set_in
from ckptmove.verification.case.user_code_edits import NO_FIX, Fix, before_statement, replaced, text_of
from ckptmove.verification.case.user_code_names import builder_in, given_to_case, innermost, set_before

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ckptmove.verification.case.user_code import Entrance, Line
    from ckptmove.verification.case.user_code_names import Given

_MISSING: Final = re.compile(r"missing ([^\s;]+)")
_UNSAVED: Final = (
    "what was not registered when it was saved is not in the checkpoint: load the rest with strict=False, "
    "begin the optimizer anew, train and save again"
)
_REBUILT: Final = "build the optimizer after model = model.to(device), and after whatever else replaces its parameters"


def built_again(home: Line, *others: Line, model: str = "", optimizer: str = "") -> Fix:
    """The optimizer once more, where all its parameters are the model's.

    Args:
        home: the user's function.
        others: the line that built the optimizer, where that is known.
        model: of several models, the key of the one that it should step.
        optimizer: of several optimizers, its key.
    """
    found = given_to_case(home, *others)
    given = None if found is None else found.of_parts(model, optimizer)
    if given is None or given.model is None:
        return Fix(f"{_REBUILT}, in the case at {home}")
    built = _builder(given, others)
    if built is None or not _is_of_model(built, given, given.model):
        name = ast.unparse(given.model)
        return Fix(f"{_REBUILT}: once more before {given.line}, of what {name}.parameters() gives there")
    return before_statement(given.line, given.statement, text_of(given.line, built))


def _builder(given: Given, lines: tuple[Line, ...]) -> ast.stmt | None:
    """The statement that built the optimizer: of those in several branches the one that ran."""
    found = set_before(given.line, given.statement, given.optimizer)
    if found is None or not isinstance(given.optimizer, ast.Name):
        return None
    last = builder_in(given, found, given.optimizer.id, *lines)
    return last if last is not None or innermost(found, given.optimizer.id) is not found else found


def _is_of_model(built: ast.stmt, given: Given, model: ast.expr) -> bool:
    """Whether a statement, said once more, takes the parameters of the model as it is by then, and leaves the model."""
    value = (assigned(built) or (None, None))[1]
    if value is None:
        return False
    reads = any(isinstance(one, ast.expr) and ast.unparse(one) == ast.unparse(model) for one in ast.walk(value))
    own = read_in(model)
    is_stale = any(_comes_of(name, own, built, given) for name in read_in(value) - own)
    return reads and not is_stale and own.isdisjoint(set_in(built))


def _comes_of(name: str, sources: set[str], near: ast.stmt, given: Given) -> bool:
    """Whether a variable was made of what the model was before: ``params = list(model.parameters())``."""
    made = set_before(given.line, near, ast.Name(name))
    if made is None or isinstance(made, SCOPES):
        return False
    read = {one.id for one in ast.walk(made) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    return not read.isdisjoint(sources) or any(_comes_of(one, sources, made, given) for one in read - {name})


def as_batch(home: Line) -> Fix:
    """The first batch of a dataset in its place."""
    given = given_to_case(home)
    if given is None or given.batch is None:
        return Fix(f"batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=8))), in the case at {home}")
    name = called(given.line, "torch")
    batch = text_of(given.line, given.batch)
    loader = f"next(iter({name}.utils.data.DataLoader({batch}, batch_size=8)))"
    if isinstance(given.batch, ast.Name) and set_before(given.line, given.statement, given.batch) is not None:
        brought = "" if name in imported(given.line) else f"import {name}; "
        return before_statement(given.line, given.statement, f"{brought}{batch} = {loader}")
    if name not in imported(given.line):
        return Fix(f"import torch, and give {loader} in place of {batch}, at {given.line}")
    return replaced(given.line, (given.batch, loader))


def unmoved(line: Line) -> Fix:
    """A line that moves a whole dataset, without the move: what is taken of it is to be moved."""
    given = given_to_case(line)
    others = [] if given is None else [one for one in (given.model, given.criterion) if one is not None]
    moves = [
        node
        for target, value in _given_values(line)
        if target is None or all(ast.unparse(target) != ast.unparse(one) for one in others)
        for node in ast.walk(value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and callee(node) in {"to", "cuda"}
    ]
    if len(moves) == 1 and isinstance(moves[0].func, ast.Attribute):
        return replaced(line, (moves[0], text_of(line, moves[0].func.value)))
    return Fix("move a batch at a time, in the loop: batch = batch.to(device)")


def _given_values(line: Line) -> Iterator[tuple[ast.expr | None, ast.expr]]:
    """What the statements of a line make, each with what it is given to: a module that is moved is given to nothing."""
    for one in statements_at(line):
        target, value = assigned(one) or (None, None)
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        elif value is not None:
            yield target, value


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
