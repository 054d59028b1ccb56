"""Fixes for lines without a tensor at fault: a ``backward`` on another device, a device by its name."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ckptmove.verification.case.edits import Fix, replaced, text_of, with_to
from ckptmove.verification.case.fixes import device_in
from ckptmove.verification.case.source import FUNCTIONS, Line, assignment_before, callee, line_of, nodes_of, tree_of

if TYPE_CHECKING:
    from ckptmove.verification.case.fixes import Scene
    from ckptmove.verification.case.source import Running
    from ckptmove.verification.simulated.rules import WrongGradient


def returned(line: Line, error: WrongGradient) -> tuple[Line, Fix]:
    """The line where a ``backward`` of the user's returns a gradient, and that line with the gradient moved.

    Args:
        line: first line of the ``backward``. Its frame is gone: torch checks the gradient after it returned.
        error: torch's error.
    """
    if not error.argument:
        return line, Fix("return it on the device of the gradient passed to backward")
    device = f"{error.argument}.device"
    for one in _returns(line):
        node = _gradient(one, error.index)
        there, written = f"one.to({device})", ast.unparse(node)
        text = f"tuple(one if one is None else {there} for one in {written})" if _is_several(node) else ""
        if there not in written and not written.endswith((f".to({device})", "None")):
            fix = replaced(line.path, (node, text or with_to(line.path, node, device)))
            return line_of(line.path, node.lineno), fix
    return line, Fix(f"return it at {line} where the input is: .to({device})")


def _returns(line: Line) -> list[ast.Return]:
    """The ``return`` statements with a value in the function that begins in a line, decorators included."""
    functions = [one for one in ast.walk(tree_of(line.path)) if isinstance(one, FUNCTIONS)]
    own = [one for one in functions if line.number in {one.lineno, *(part.lineno for part in one.decorator_list)}]
    every = [one for function in own for one in ast.walk(function) if isinstance(one, ast.Return)]
    return [one for one in every if one.value is not None]


def _gradient(one: ast.Return, index: int) -> ast.expr:
    """The gradient at an index of a returned tuple: torch counts the ``None`` of an input that is no tensor, too."""
    value = one.value or ast.Constant(None)
    built = assignment_before(one, value.id) if isinstance(value, ast.Name) else None
    if isinstance(built, ast.Assign) and isinstance(built.value, ast.Tuple):
        value = built.value
    is_each = isinstance(value, ast.Tuple) and not any(isinstance(part, ast.Starred) for part in value.elts)
    return value.elts[index] if isinstance(value, ast.Tuple) and is_each and index < len(value.elts) else value


def _is_several(value: ast.expr) -> bool:
    return isinstance(value, (ast.Tuple, ast.ListComp)) or (isinstance(value, ast.Call) and callee(value) == "tuple")


def without_cuda(running: Running, scene: Scene) -> Fix:
    """A line that names CUDA, with the case's device instead."""
    spot, device = running.spot, device_in(running, scene)
    path = spot.line.path
    for node in nodes_of(spot):
        if isinstance(node, ast.Call) and callee(node) == "cuda" and isinstance(node.func, ast.Attribute):
            return replaced(path, (node, f"{text_of(path, node.func.value)}.to({device})"))
        if isinstance(node, ast.Constant) and str(node.value).partition(":")[0] == "cuda":
            return replaced(path, (node, device))
    return Fix("use the device passed to the function")
