"""What the user's code calls a thing where it stands: a tensor, what holds it, and the target.

Never says that a name has a value where it is to be used: whoever makes a line of it asks ``user_code_pastes``.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.verification.case.tensor_names import leaves
from ckptmove.verification.case.user_code import (
    SCOPES,
    assigned,
    callee,
    function_of,
    functions_of,
    line_of,
    statements_at,
    tree_of,
)
from ckptmove.verification.case.user_code_bindings import blocks, set_in, spot_of, way_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from ckptmove.verification.case.user_code import Line

_MODEL: Final = (0, "model")
_OPTIMIZER: Final = (1, "optimizer")
_CRITERION: Final = (2, "criterion")
_BATCH: Final = (3, "batch")


class Found(NamedTuple):
    """A variable.

    Attributes:
        name: as it is written.
        line: where its frame is.
        is_own: whether a statement in that frame can give it another value.
    """

    name: str
    line: Line
    is_own: bool


def variables(sought: object, frames: Iterable[tuple[FrameType, int]]) -> Iterator[Found]:
    """What something is called in frames: variables, attributes of ``self``, and globals."""
    for frame, number in frames:
        line = line_of(frame.f_code.co_filename, number)
        for name, value in frame.f_locals.items():
            if value is sought:
                yield Found(name, line, is_own(frame, name))
        for name, value in getattr(frame.f_locals.get("self"), "__dict__", {}).items():
            if value is sought:
                yield Found(f"self.{name}", line, is_own=not _is_expression(frame))
        for name in frame.f_code.co_names:
            if frame.f_globals.get(name) is sought:
                yield Found(name, line, is_own=False)


def is_own(frame: FrameType, name: str) -> bool:
    """Whether a statement of a frame can give a variable another value without making another variable of it."""
    return not _is_expression(frame) and name not in frame.f_code.co_freevars


def _is_expression(frame: FrameType) -> bool:
    return frame.f_code.co_name.startswith("<")  # a lambda or a comprehension, in which there are no statements


def parameter_for_device(line: Line, home: Line) -> str:
    """What a line calls the device that the case is given: by the function that it is in; empty where it cannot."""
    for function in functions_of(line):
        given = [*function.args.posonlyargs, *function.args.args]
        is_home = line.path == home.path and _begins(function, home)
        if is_home and given:
            return given[0].arg
        if any(one.arg == "device" for one in (*given, *function.args.kwonlyargs)):
            return "device"
    return ""


def _begins(function: ast.FunctionDef | ast.AsyncFunctionDef, home: Line) -> bool:
    return home.number in {function.lineno, *(one.lineno for one in function.decorator_list)}


class Given(NamedTuple):
    """What the user's file gives to its case.

    Attributes:
        line: of the call that makes the case.
        statement: that the call is in.
        model, optimizer, criterion, batch: the expressions; None for one that is not given by itself.
    """

    line: Line
    statement: ast.stmt
    model: ast.expr | None
    optimizer: ast.expr | None
    criterion: ast.expr | None
    batch: ast.expr | None

    def of_parts(self, model: str, optimizer: str) -> Given:
        """The same of one of several models and one of several optimizers, by their keys; empty for the only one."""
        return self._replace(model=self._at(self.model, model), optimizer=self._at(self.optimizer, optimizer))

    def _at(self, whole: ast.expr | None, key: str) -> ast.expr | None:
        """What a dict that is written out has at a key, in the call or where its variable is set; None for none."""
        if not key:
            return whole
        made = set_before(self.line, self.statement, whole)
        given = whole if made is None else (assigned(made) or (None, None))[1]
        if not isinstance(given, ast.Dict):
            return None
        pairs = zip(given.keys, given.values, strict=True)
        return next((one for name, one in pairs if isinstance(name, ast.Constant) and name.value == key), None)


def given_to_case(home: Line, *others: Line) -> Given | None:
    """The one call of ``Case`` in the function of a line, or of the first of others that has one, or in the file."""
    calls = [one for one in ast.walk(tree_of(home.path)) if isinstance(one, ast.Call) and callee(one) == "Case"]
    groups = [[one for one in calls if _shares(home.path, one, line)] for line in (home, *others)]
    found = next((group[0] for group in (*groups, calls) if len(group) == 1), None)
    if found is None:
        return None
    line = line_of(home.path, found.lineno)
    every = (one for one in ast.walk(tree_of(home.path)) if isinstance(one, ast.stmt))
    holding = [one for one in every if any(part is found for part in ast.walk(one))]
    parts = (_argument(found, *which) for which in (_MODEL, _OPTIMIZER, _CRITERION, _BATCH))
    return Given(line, holding[-1], *parts)


def _shares(path: str, call: ast.Call, line: Line) -> bool:
    """Whether a call is in the function that a line is in."""
    inner, outer = function_of(line_of(path, call.lineno)), function_of(line)
    return line.path == path and inner is not None and outer is not None and inner.lineno == outer.lineno


def _argument(call: ast.Call, index: int, name: str) -> ast.expr | None:
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    named = next((one.value for one in call.keywords if one.arg == name), None)
    return call.args[index] if index < len(call.args) else named


def set_before(line: Line, near: ast.stmt, variable: ast.expr | None) -> ast.stmt | None:
    """The last statement before another one that gives a variable its value, or has one that does in a branch of it.

    Args:
        line: one of the file.
        near: the statement before which it is sought.
        variable: the variable.
    """
    name = variable.id if isinstance(variable, ast.Name) else ""
    return next((one for one in earlier(line, near) if name in set_in(one)), None)


def earlier(line: Line, near: ast.stmt) -> Iterator[ast.stmt]:
    """The statements before another one, in the blocks that it is in and in its function, the last first.

    Args:
        line: one of the file.
        near: the other one.
    """
    for block in reversed(way_to(tree_of(line.path), spot_of(near))):
        yield from () if isinstance(block.owner, ast.Module) else reversed(block.body[: block.number])
        if isinstance(block.owner, SCOPES):
            return


def between(line: Line, first: ast.stmt, last: ast.stmt) -> list[ast.stmt]:
    """The statements on the way from one of a file to another one further down, in the blocks that the first is in."""
    way = way_to(tree_of(line.path), spot_of(first))
    return [one for block in way for one in block.body[block.number + 1 :] if spot_of(one) < spot_of(last)]


def innermost(statement: ast.stmt, name: str) -> ast.stmt:
    """Of a statement and those under it the last one that gives a variable its value and has none under it."""
    inner = [one for _, body in blocks(statement) for one in body if name in set_in(one)]
    return innermost(inner[-1], name) if inner and not isinstance(statement, SCOPES) else statement


def builder_in(given: Given, statement: ast.stmt, name: str, *lines: Line) -> ast.stmt | None:
    """Of a statement and those under it the one in one of some lines that gives a variable its value; None for none."""
    inside = range(statement.lineno, (statement.end_lineno or 0) + 1)
    found = [one for line in lines if line.path == given.line.path for one in statements_at(line)]
    return next((one for one in reversed(found) if one.lineno in inside and name in set_in(one)), None)


def is_written(value: Any, tensor: torch.Tensor) -> bool:
    """Whether the keys on the way to a tensor are written as they are printed: those of an ``Enum`` are not."""
    if value is tensor:
        return True
    key = next(key for key, one in _items(value) if any(part is tensor for _, part in leaves(one)))
    is_said = not isinstance(value, Mapping) or _is_literal(key)
    return is_said and is_written(value[key], tensor)


def _is_literal(key: object) -> bool:
    with suppress(ValueError, SyntaxError):
        return bool(ast.literal_eval(repr(key)) == key)
    return False


def rebuilt(name: str, value: Any, tensor: torch.Tensor, device: str) -> str:
    """An expression for what a tensor lies in, with the tensor moved; of nothing but tensors, with all of them moved.

    Args:
        name: what it is called.
        value: the tensor, or the tuple, list or dict that has it, or has what has it.
        tensor: the tensor.
        device: an expression for the target.
    """
    if value is tensor:
        return f"{name}.to({device})"
    key = next(key for key, one in _items(value) if any(part is tensor for _, part in leaves(one)))
    fields = getattr(value, "_fields", None)
    if fields is not None:
        inner = rebuilt(f"{name}.{fields[key]}", value[key], tensor, device)
        return f"{name}._replace({fields[key]}={inner})"
    inner = rebuilt(f"{name}[{key!r}]", value[key], tensor, device)
    if isinstance(value, Mapping):
        return f"{{**{name}, {key!r}: {inner}}}"
    if all(isinstance(one, torch.Tensor) for one in value):
        made = f"one.to({device}) for one in {name}"
        return f"[{made}]" if isinstance(value, list) else f"tuple({made})"
    parts = ", ".join(inner if n == key else f"{name}[{n}]" for n in range(len(value)))
    return f"[{parts}]" if isinstance(value, list) else f"({parts},)"


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
    return pairs
