"""Fixes for a tensor of a device that is given to numpy: each tensor is copied to the CPU, not its list."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.training.code.containers import Move, attributes_of, moved
from ckptmove.training.code.source import (
    callee,
    full_name,
    function_of,
    name_of_module,
    nodes_of,
    parents,
    tree_of,
)
from ckptmove.training.code.tensor_names import tensors_in
from ckptmove.training.fixes.edits import Fix, called, reads, replaced, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.training.code.source import Running

#: Calls whose result is on the CPU.
_ON_HOST: Final = frozenset({"cpu", "float", "int", "item", "len", "numpy", "tolist"})
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.GeneratorExp)
#: Uses of a list that are the same for numbers and tensors, beside functions of numpy.
_PLAIN_USES: Final = frozenset({"append", "clear", "len"})


def for_numpy(running: Running, operands: Sequence[torch.Tensor]) -> Fix:
    """A line that gives tensors of a device to numpy, or that puts them into the list, with copies on the CPU.

    Args:
        operands: the tensor that numpy was given.
    """
    spot = running.spot
    call, path = spot.node, spot.line.path
    move = _move(operands)
    calls = [one for one in nodes_of(spot) if isinstance(one, ast.Call) and callee(one) == "numpy"]
    owners = [one.func.value for one in calls if isinstance(one.func, ast.Attribute)] * (callee(call) == "numpy")
    changes = [(one, called(path, one, move)) for one in owners if callee(one) != "cpu"]
    given = [*call.args, *(one.value for one in call.keywords)] if isinstance(call, ast.Call) else []
    if not changes:
        fixes = (_where_appended(one, running) for one in given)
        if (fix := next((one for one in fixes if one is not None), None)) is not None:
            return fix
        changes = [change for one in given for change in _copies(one, running, operands)]
    changes = changes or [change for one in given[:1] for change in _unseen(one, path, move)]
    return replaced(path, *changes) if changes else Fix(f"move the tensor to the CPU at {spot.line}: .{move}")


def _move(tensors: Sequence[torch.Tensor]) -> str:
    """The method calls that numpy's copy of tensors needs: one with a gradient is detached first."""
    return "detach().cpu()" if any(one.requires_grad for one in tensors) else "cpu()"


def _copies(node: ast.expr, running: Running, operands: Sequence[torch.Tensor]) -> Iterator[tuple[ast.expr, str]]:
    """The expressions of an argument with tensors of a device, each with its copy on the CPU."""
    path, value = running.spot.line.path, _value(node, running)
    tensors = _on_device(value)
    if isinstance(node, (ast.List, ast.Tuple, ast.Starred)):
        for part in node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node.value]:
            yield from _copies(part, running, operands)
    elif tensors:
        text = moved(text_of(path, node), value, Move(_move(tensors), name_of_module(path, "torch")))
        yield from [(node, text)] * bool(text)
    elif callee(node) not in _ON_HOST and not isinstance(node, _COMPREHENSIONS):
        inner = [_value(one, running) for one in ast.walk(node) if isinstance(one, ast.expr)]
        found = [one for one in inner if isinstance(one, torch.Tensor) and _on_device(one)]
        yield from [(node, called(path, node, _move([*found, *operands])))] * bool(found)


def _unseen(node: ast.expr, path: str, move: str) -> Iterator[tuple[ast.expr, str]]:
    """The parts of an argument that may be tensors: of a list its elements, which have no variable."""
    if isinstance(node, _COMPREHENSIONS):
        yield from _unseen(node.elt, path, move)
    elif isinstance(node, (ast.List, ast.Tuple)):
        for part in node.elts:
            yield from _unseen(part, path, move)
    elif not isinstance(node, ast.Constant) and callee(node) not in _ON_HOST:
        yield node, called(path, node, move)


def _value(node: ast.expr, running: Running) -> Any:
    """Value of a variable, an attribute or an item in a frame; None for any other expression. No property is run."""
    if isinstance(node, ast.Name):
        return running.frame.f_locals.get(node.id, running.frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return attributes_of(_value(node.value, running)).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        held, key = _value(node.value, running), node.slice.value
        if isinstance(held, dict):
            return held.get(key)
        is_index = isinstance(held, (list, tuple)) and isinstance(key, int) and -len(held) <= key < len(held)
        return held[key] if is_index else None
    return None


def _on_device(value: object) -> list[torch.Tensor]:
    """The tensors of a value that are not on the CPU."""
    every = [value] if isinstance(value, torch.Tensor) else [one for _, one in tensors_in(value)]
    return [one for one in every if one.device.type != "cpu"]


def _where_appended(node: ast.expr, running: Running) -> Fix | None:
    """A line that appends a tensor to a list that only numpy reads, with its number or its copy; None for others."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node.value
    value, spot = _value(node, running), running.spot
    path, name = spot.line.path, ast.unparse(node)
    tensors = _on_device(value)
    if not isinstance(value, list) or not tensors:
        return None
    function = function_of(node) if isinstance(node, ast.Name) else None  # the whole file may use an attribute
    nodes = [one for one in ast.walk(function or tree_of(path)) if isinstance(one, ast.expr)]
    if not all(_is_plain(one, path) for one in reads(nodes, name)):
        return None
    appends = [one for one in nodes if isinstance(one, ast.Call) and callee(one) == "append" and len(one.args) == 1]
    own = [one for one in appends if isinstance(one.func, ast.Attribute) and ast.unparse(one.func.value) == name]
    left = [one.args[0] for one in own if callee(one.args[0]) not in _ON_HOST]
    is_each = len(tensors) == len(value) or len(left) < len(own)  # the others were mended before
    if not left or not is_each:
        return None
    text = called(path, left[0], _move(tensors) if any(one.dim() for one in tensors) else "item()")
    fix = replaced(path, (left[0], text))
    return fix if fix.where else None


def _is_plain(node: ast.expr, path: str) -> bool:
    """Whether a use of a list is the same for numbers and for tensors."""
    parent: Any = next(parents(node))
    if isinstance(parent, ast.Attribute):
        return parent.attr in _PLAIN_USES
    if isinstance(parent, ast.Subscript):
        parent = next(parents(parent))
    is_argument = isinstance(parent, ast.Call) and node is not parent.func
    return is_argument and (callee(parent) in _PLAIN_USES or full_name(path, parent.func).startswith("numpy."))
