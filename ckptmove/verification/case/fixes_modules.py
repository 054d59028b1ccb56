"""Fixes for a module that is neither the model nor the loss and stayed on the CPU: a teacher, a target network."""

from __future__ import annotations

import ast
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ckptmove.verification.case.case_call import required_device
from ckptmove.verification.case.edits import Fix, after, before
from ckptmove.verification.case.fixes import device_expression, device_in, is_fixed
from ckptmove.verification.case.source import (
    FUNCTIONS,
    assigned,
    assignment_before,
    attribute_assignments,
    nodes_of_class,
    parents,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    import torch

    from ckptmove.verification.case.fixes import Scene
    from ckptmove.verification.case.source import Running


class ReachableModule(NamedTuple):
    """A module that a frame can reach, and one of its tensors.

    Attributes:
        name: expression for the tensor: ``teacher.0.weight``.
        module: expression for the module: ``teacher``, ``self.ema``.
        holder: the object that has the module as an attribute; None for a variable.
        running: the frame.
    """

    name: str
    module: str
    holder: object
    running: Running


def reachable_module(tensor: torch.Tensor, frames: Sequence[Running]) -> ReachableModule | None:
    """The module that has a tensor, or the base of a view; None if no frame can reach it.

    Args:
        tensor: the tensor.
        frames: frames of the user's code, the innermost last. The outermost that reaches the module names it best.
    """
    sought = {id(tensor), id(tensor._base)} - {id(None)}  # noqa: SLF001  # no public name for it
    for running in frames:
        for name, module, holder in _modules(running.frame):
            for key, one in chain(module.named_parameters(), module.named_buffers()):
                if id(one) in sought:
                    return ReachableModule(f"{name}.{key}", name, holder, running)
    return None


def _modules(frame: FrameType) -> Iterator[tuple[str, nn.Module, object]]:
    """The modules that a frame can reach by its variables, except ``self``."""
    read = ((name, frame.f_globals.get(name)) for name in frame.f_code.co_names)
    for name, value in [*frame.f_locals.items(), *read]:
        if isinstance(value, nn.Module) and name != "self":
            yield name, value, None
        elif not isinstance(value, (nn.Module, ModuleType, type)):
            parts = [*getattr(value, "__dict__", {}).items()]
            yield from ((f"{name}.{key}", one, value) for key, one in parts if isinstance(one, nn.Module))


def where_assigned(found: ReachableModule, scene: Scene) -> Fix:
    """Move of a module after the statement that assigns it, if that knows the target; else before its use."""
    for path, statement, name in _assignments(found):
        device = device_expression(statement, path, scene, module=required_device(statement))
        fix = after(path, statement, f"{name} = {name}.to({device})")
        if fix.where and not is_fixed(device, scene):
            return fix
    spot, device = found.running.spot, device_in(found.running, scene)
    if spot.statement is None:
        return Fix(f"move {found.module} before it is used, for {spot.line}: .to({device})")
    return before(spot.line.path, spot.statement, f"{found.module}.to({device})")


def _assignments(found: ReachableModule) -> Iterator[tuple[str, ast.stmt, str]]:
    """Path, statement and target of the assignment of a module; of an attribute only if its class has no other one."""
    spot, name = found.running.spot, found.module
    if found.holder is not None:
        key = name.rpartition(".")[2]
        nodes = nodes_of_class(type(found.holder))
        every = [(path, one) for path, node in nodes for one in attribute_assignments([node], key)]
        if len(every) == 1:
            yield *every[0], ast.unparse(assigned(every[0][1])[0] or ast.Name(key))
        return
    scopes = [one for one in parents(spot.statement) if isinstance(one, FUNCTIONS)]
    near = [*([spot.statement] if spot.statement is not None else []), *scopes]
    made = (assignment_before(one, name) for one in near)
    yield from ((spot.line.path, one, name) for one in islice(filter(None, made), 1))
