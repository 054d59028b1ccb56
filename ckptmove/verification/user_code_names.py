"""What the user's code calls a thing where it stands: a tensor, what holds it, and the target.

Never names what a line cannot reach: a name of another function, or one that is given its value further down.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.verification.tensor_names import leaves
from ckptmove.verification.user_code import callee, function_of, functions_of, line_of, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from ckptmove.verification.user_code import Line

_MODEL: Final = (0, "model")
_OPTIMIZER: Final = (1, "optimizer")
_CRITERION: Final = (2, "criterion")
_BATCH: Final = (3, "batch")
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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
        line: of the statement that makes the case.
        model, optimizer, criterion, batch: the expressions; None for one that is not given by itself.
    """

    line: Line
    model: ast.expr | None
    optimizer: ast.expr | None
    criterion: ast.expr | None
    batch: ast.expr | None


def given_to_case(home: Line, *others: Line) -> Given | None:
    """The one call of ``Case`` in the function of a line, or of the first of others that has one, or in the file."""
    calls = [one for one in ast.walk(tree_of(home.path)) if isinstance(one, ast.Call) and callee(one) == "Case"]
    groups = [[one for one in calls if _shares(home.path, one, line)] for line in (home, *others)]
    found = next((group[0] for group in (*groups, calls) if len(group) == 1), None)
    if found is None:
        return None
    parts = (_argument(found, *which) for which in (_MODEL, _OPTIMIZER, _CRITERION, _BATCH))
    return Given(line_of(home.path, found.lineno), *parts)


def _shares(path: str, call: ast.Call, line: Line) -> bool:
    """Whether a call is in the function that a line is in."""
    inner, outer = function_of(line_of(path, call.lineno)), function_of(line)
    return line.path == path and inner is not None and outer is not None and inner.lineno == outer.lineno


def _argument(call: ast.Call, index: int, name: str) -> ast.expr | None:
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    named = next((one.value for one in call.keywords if one.arg == name), None)
    return call.args[index] if index < len(call.args) else named


def set_before(line: Line, variable: ast.expr | None) -> ast.stmt | None:
    """The last statement of a line's function before the line that gives a variable its value."""
    function = function_of(line)
    if function is None or not isinstance(variable, ast.Name):
        return None
    found = [one for one in _assignments_in(function) if one.lineno < line.number and variable.id in _names(one)]
    return max(found, key=lambda one: one.lineno, default=None)


def _assignments_in(part: ast.AST) -> Iterator[ast.Assign | ast.AnnAssign]:
    """Those of a function, but not of a function inside it."""
    for one in ast.iter_child_nodes(part):
        if isinstance(one, (ast.Assign, ast.AnnAssign)):
            yield one
        elif isinstance(one, (ast.stmt, ast.ExceptHandler)) and not isinstance(one, _SCOPES):
            yield from _assignments_in(one)


def _names(one: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
    return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}


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
