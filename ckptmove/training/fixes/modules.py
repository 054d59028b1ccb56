"""Fixes for a module that is neither the model nor the loss and stayed on the CPU: a teacher, a target network."""

from __future__ import annotations

import ast
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ckptmove.training.code.calls import devices_of, is_expression, required_device
from ckptmove.training.code.containers import attributes_of
from ckptmove.training.code.source import (
    FUNCTIONS,
    assigned,
    attribute_assignments,
    before_in_block,
    earlier,
    function_of,
    nodes_of_class,
    parents,
    read,
    stored,
)
from ckptmove.training.code.watch import is_target
from ckptmove.training.fixes.edits import Fix, after, before
from ckptmove.training.fixes.moves import device_before
from ckptmove.training.fixes.scene import device_expression, device_in, is_fixed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    import torch

    from ckptmove.training.code.source import Running
    from ckptmove.training.fixes.scene import Scene


class ReachableModule(NamedTuple):
    """A module that a frame can reach, and one of its tensors."""

    name: str  # expression for the tensor: `teacher.0.weight`
    module: str  # expression for the module: `teacher`, `self.ema`; or for a list or dict of modules
    holder: object  # the object that has the module as an attribute; None for a variable
    running: Running  # the frame
    every: str = ""  # expression for the modules of the list or dict; empty for a module

    def move(self, name: str, device: str) -> str:
        """Statement that moves it, by a name for it."""
        every = f"{name}{self.every.removeprefix(self.module)}"
        return f"for one in {every}: one.to({device})" if self.every else f"{name} = {name}.to({device})"


def reachable_module(tensor: torch.Tensor, frames: Sequence[Running]) -> ReachableModule | None:
    """The module that has a tensor, or the base of a view; None if no frame can reach it.

    Args:
        frames: frames of the user's code, the innermost last. The outermost that reaches the module names it best.
    """
    sought = {id(tensor), id(tensor._base)} - {id(None)}
    for running in frames:
        for name, value, holder in _values(running.frame):
            is_dict = isinstance(value, dict)
            every = {} if isinstance(value, nn.Module) else value if is_dict else dict(enumerate(value))
            modules = {f"{name}[{key!r}]": one for key, one in every.items()} or {name: value}
            for way, module in modules.items():
                for key, one in chain(module.named_parameters(), module.named_buffers()):
                    if id(one) in sought:
                        listed = f"{name}.values()" if is_dict else name
                        return ReachableModule(f"{way}.{key}", name, holder, running, listed * bool(every))
    return None


def _values(frame: FrameType) -> Iterator[tuple[str, Any, object]]:
    """The modules, and the lists and dicts of modules, that a frame can reach by its variables, except ``self``."""
    read = ((name, frame.f_globals.get(name)) for name in frame.f_code.co_names)
    named = frame.f_code.co_freevars if is_expression(frame) else frame.f_locals
    for name, value in [*((name, frame.f_locals[name]) for name in named), *read]:
        if _is_modules(value) and name != "self":
            yield name, value, None
        elif not isinstance(value, (nn.Module, ModuleType, type)):
            parts = [*attributes_of(value).items()]
            yield from ((f"{name}.{key}", one, value) for key, one in parts if _is_modules(one))


def _is_modules(value: object) -> bool:
    """Whether a value is a module, or a list, tuple or dict of modules alone."""
    every = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return isinstance(value, nn.Module) or (bool(every) and all(isinstance(one, nn.Module) for one in every))


def where_assigned(found: ReachableModule, scene: Scene) -> Fix:
    """Move of a module after the statement that assigns it, if that knows the target; else before its use."""
    for path, statement, name in _assignments(found, scene):
        device = required_device(statement) or _device_after(statement, path, found, scene)
        fix = after(path, statement, found.move(name, device))
        if fix.where and not is_fixed(device, scene):
            return fix
    spot, device = found.running.spot, device_in(found.running, scene)
    if spot.statement is None:
        return Fix(f"move {found.module} before it is used, for {spot.line}: .to({device})")
    text = found.move(found.module, device) if found.every else f"{found.module}.to({device})"
    return before(spot.line.path, spot.statement, text)


def _device_after(statement: ast.stmt, path: str, found: ReachableModule, scene: Scene) -> str:
    """Expression for the target after the statement that assigns a module."""
    if found.holder is None:
        return device_before(statement, found.running, scene)
    for way, _ in ((way, one) for way, one in devices_of("self", found.holder) if is_target(one, scene.place.device)):
        key, dot, rest = way.removeprefix("self.").partition(".")
        for one in attribute_assignments(ast.walk(function_of(statement) or statement), key):
            value = assigned(one)[1]
            if one.lineno < statement.lineno:
                return way
            if isinstance(value, ast.Name):
                return f"{value.id}{dot}{rest}"
    return device_expression(statement, path, scene)


def _assignments(found: ReachableModule, scene: Scene) -> Iterator[tuple[str, ast.stmt, str]]:
    """Path, statement and target of the assignment of a module; of an attribute only if its class has no other one."""
    spot, name = found.running.spot, found.module
    if found.holder is not None:
        key = name.rpartition(".")[2]
        nodes = nodes_of_class(type(found.holder))
        every = [(path, one) for path, node in nodes for one in attribute_assignments([node], key)]
        if len(every) == 1:
            yield *every[0], ast.unparse(assigned(every[0][1])[0] or ast.Name(key))
        return
    if spot.statement is None:
        return
    scopes = (one for one in parents(spot.statement) if isinstance(one, FUNCTIONS))
    before = [one for near in (spot.statement, *scopes) for one in earlier(near)]
    if spot.code.co_name == "<module>":
        outermost = [one for one in (spot.statement, *parents(spot.statement)) if isinstance(one, ast.stmt)][-1]
        before += before_in_block(outermost)
    before = [one for one in before if name in stored(one)]
    frames = (frame for built in scene.watch.built.values() for frame in built if frame.spot.code is spot.code)
    first = min((frame.spot.line.number for frame in frames), default=0)
    late = [one for one in before if 0 < first < one.lineno and _is_rebound(one, name)]  # `model = compile(model)`
    yield from ((spot.line.path, one, name) for one in islice((one for one in before if one not in late), 1))


def _is_rebound(statement: ast.stmt, name: str) -> bool:
    """Whether each assignment of a variable in a statement computes it of the variable itself."""
    every = [assigned(one) for one in ast.walk(statement)]
    values = [value for target, value in every if isinstance(target, ast.Name) and target.id == name]
    return all(value is not None and name in read(value) for value in values)
