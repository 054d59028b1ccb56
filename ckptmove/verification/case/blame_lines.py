"""What mends a line of the user's that no tensor is to blame for: a ``backward`` that returns one, a device by name.

Never looks at a value: all that it takes is what the file says.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ckptmove.verification.case.blame_fixes import device_at
from ckptmove.verification.case.user_code import Line, callee, function_of, line_of, own_nodes
from ckptmove.verification.case.user_code_edits import Fix, moved, replaced, text_of
from ckptmove.verification.case.user_code_names import set_before

if TYPE_CHECKING:
    from ckptmove.verification.case.blame_fixes import Scene
    from ckptmove.verification.simulated.rules import WrongGradient


def returned(line: Line, error: WrongGradient) -> tuple[Line, Fix]:
    """The line in which a function of the user's returns a gradient, and that line with the gradient moved.

    Args:
        line: the first one of its ``backward``.
        error: what torch would say of it.
    """
    if not error.argument:
        return line, Fix("return it on the device of the gradient that backward is given")
    device = f"{error.argument}.device"
    for one in _returns(line):
        node = _gradient(line, one, error.index)
        there, written = f"one.to({device})", ast.unparse(node)
        text = f"tuple(one if one is None else {there} for one in {written})" if _is_several(node) else ""
        if there not in written and not written.endswith((f".to({device})", "None")):
            where = line_of(line.path, node.lineno)
            return where, replaced(where, (node, text or moved(where, node, device)))
    return line, Fix(f"return it at {line} where the input is: .to({device})")


def _returns(line: Line) -> list[ast.Return]:
    """What a function returns that begins in a line, less what is nothing."""
    function = function_of(line)
    every = [] if function is None else [one for one in ast.walk(function) if isinstance(one, ast.Return)]
    return [one for one in every if one.value is not None]


def _gradient(line: Line, one: ast.Return, index: int) -> ast.expr:
    """The gradient of an index in what is returned: torch counts the ``None`` of what is no tensor, too."""
    value = one.value or ast.Constant(None)
    built = set_before(line, one, value)
    if isinstance(built, ast.Assign) and isinstance(built.value, ast.Tuple):
        value = built.value
    is_each = isinstance(value, ast.Tuple) and not any(isinstance(part, ast.Starred) for part in value.elts)
    return value.elts[index] if isinstance(value, ast.Tuple) and is_each and index < len(value.elts) else value


def _is_several(value: ast.expr) -> bool:
    return isinstance(value, (ast.Tuple, ast.ListComp)) or (isinstance(value, ast.Call) and callee(value) == "tuple")


def as_given(line: Line, scene: Scene) -> Fix:
    """A line that names CUDA, with the device in its place that the case is given."""
    device = device_at(line, scene)
    for node in own_nodes(line):
        if isinstance(node, ast.Call) and callee(node) == "cuda" and isinstance(node.func, ast.Attribute):
            return replaced(line, (node, f"{text_of(line, node.func.value)}.to({device})"))
        if isinstance(node, ast.Constant) and str(node.value).partition(":")[0] == "cuda":
            return replaced(line, (node, device))
    return Fix("take the device that the function is given")
