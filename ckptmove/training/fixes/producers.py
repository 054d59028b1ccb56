"""Move a tensor in the ``return`` of the user's function that makes it, if several lines call that function.

A move at the line that failed would leave the others as they are: evaluation code, for example.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.training.code.calls import devices_of, required_device
from ckptmove.training.code.containers import Move, attributes_of, moved
from ckptmove.training.code.source import (
    SCOPES,
    assigned,
    callee,
    functions_at,
    name_of_module,
    parameters_of,
    since_set,
    stored,
    tree_of,
)
from ckptmove.training.code.watch import is_passed, is_target
from ckptmove.training.fixes.edits import operand, replaced

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from ckptmove.training.code.source import Running
    from ckptmove.training.fixes.edits import Fix
    from ckptmove.training.fixes.scene import Scene

#: Number of calls from which on the function is edited, and not its caller.
_SEVERAL: Final = 2


def where_returned(name: str, value: object, running: Running, scene: Scene) -> tuple[Fix, str] | None:
    """The ``return`` or ``yield`` with a move of what a variable is set to, and the device.

    Args:
        value: the value of the variable: a tensor, or a container of tensors.
        running: the frame that has it.

    Returns:
        None if a call of one function of the user's does not set the variable, or only one line calls it, or no
        expression for the target is known in it.
    """
    near = running.spot.statement
    target, call = _set_by(None if near is None else since_set(near, name)[1])
    function, owner = (None, None) if call is None else _called(call.func, running.frame)
    code, shared = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if target is None or call is None or code is None:
        return None
    path = code.co_filename
    node = next(iter(functions_at(path, code.co_firstlineno)), None)
    if node is None or not scene.entrance.is_own(path) or _calls({running.spot.line.path, path}, node) < _SEVERAL:
        return None
    left = _returned(node)
    given = None if left is None else _part(left, target, name)
    device = _device(path, shared, node, owner, scene)
    if given is None or not device:
        return None
    is_named = isinstance(value, torch.Tensor) or isinstance(given, ast.Name)
    move = Move(f"to({device})", name_of_module(path, "torch"))
    text = moved(operand(path, given), value, move) if is_named else ""
    fix = replaced(path, (given, text)) if text else None
    return (fix, device) if fix is not None and fix.where else None


def _set_by(setter: ast.AST | None) -> tuple[ast.expr, ast.Call] | tuple[None, None]:
    """The target of an assignment or a loop, and the call that its value is."""
    pair = (setter.target, setter.iter) if isinstance(setter, ast.For) else assigned(setter)
    return (pair[0], pair[1]) if pair[0] is not None and isinstance(pair[1], ast.Call) else (None, None)


def _called(node: ast.expr, frame: FrameType) -> tuple[Any, object]:
    """The function that an expression names in a frame, and the object of a method. No property is run."""
    owner: object = None
    found: Any = None
    if isinstance(node, ast.Name):
        found = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = frame.f_locals.get(node.value.id, frame.f_globals.get(node.value.id))
        holders = (attributes_of(owner), *map(vars, type(owner).__mro__))
        found = next((one[node.attr] for one in holders if node.attr in one), None)
    return getattr(found, "__wrapped__", found), owner  # a decorator may wrap it


def _calls(paths: set[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of calls of a function by its name in some files."""
    return sum(callee(one) == node.name for path in paths for one in ast.walk(tree_of(path)))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes in a function, without those of functions and classes in it."""
    for part in ast.iter_child_nodes(node):
        if not isinstance(part, (*SCOPES, ast.Lambda)):
            yield part
            yield from _own(part)


def _returned(node: ast.AST) -> ast.expr | None:
    """The value that a function returns or yields; None if it has several lines that do."""
    every = [one for one in _own(node) if isinstance(one, (ast.Return, ast.Yield))]
    return every[0].value if len(every) == 1 else None


def _part(returned: ast.expr, target: ast.expr, name: str) -> ast.expr | None:
    """The part of a returned value that a target gives to a variable; None if it has no expression of its own."""
    if ast.unparse(target) == name:
        return returned
    if not isinstance(target, (ast.Tuple, ast.List)) or not isinstance(returned, (ast.Tuple, ast.List)):
        return None
    if any(isinstance(one, ast.Starred) for one in (*target.elts, *returned.elts)):
        return None
    pairs = zip(target.elts, returned.elts, strict=False)
    return next((part for one, part in pairs if ast.unparse(one) == name), None)


def _device(
    path: str,
    shared: dict[str, object],
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    owner: object,
    scene: Scene,
) -> str:
    """Expression for the target in a function that has returned: a global, or an attribute of ``self``."""
    own = stored(node) | parameters_of(node)
    names = [
        name
        for name, one in shared.items()
        if isinstance(one, (str, torch.device)) and is_target(one, scene.place.device) and name not in own
    ]
    names.sort(key=lambda name: not is_passed(path, name))
    kept = (
        [way for way, one in devices_of("self", owner) if is_target(one, scene.place.device)] if "self" in own else []
    )
    return next(iter([*kept, *names]), required_device(node.body[0]))
