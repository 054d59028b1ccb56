"""A module that is neither the model nor the loss: a teacher, an average, a target network that stayed on the CPU.

Never looks further than the user's frames: at their variables, the globals that they read, and the attributes of both.
"""

from __future__ import annotations

import ast
from itertools import chain, islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from ckptmove.verification.case.blame_fixes import device_at, device_in, is_hard
from ckptmove.verification.case.user_code import assignments, functions_of, line_of, statements_at, written_in
from ckptmove.verification.case.user_code_edits import Fix, after, before
from ckptmove.verification.case.user_code_names import set_before

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    import torch

    from ckptmove.verification.case.blame_fixes import Frames, Scene
    from ckptmove.verification.case.user_code import Line


class Held(NamedTuple):
    """A tensor of a module that a frame can see.

    Attributes:
        name: as it is written there: ``teacher.0.weight``.
        module: what the frame calls the module: ``teacher``, ``self.ema``.
        holder: what the module is an attribute of; None for a variable.
        frame: the frame.
        number: the line that it is at.
    """

    name: str
    module: str
    holder: object
    frame: FrameType
    number: int


def held(tensor: torch.Tensor, frames: Frames) -> Held | None:
    """The module that has a tensor, or that a view of it is of; None where no frame can see it.

    Args:
        tensor: the tensor.
        frames: of the user's, the innermost last: of several, the outermost says what its module is for.
    """
    sought = {id(tensor), id(tensor._base)} - {id(None)}  # noqa: SLF001  # no public name for it
    for frame, number in frames:
        for name, module, holder in _modules(frame):
            for key, one in chain(module.named_parameters(), module.named_buffers()):
                if id(one) in sought:
                    return Held(f"{name}.{key}", name, holder, frame, number)
    return None


def _modules(frame: FrameType) -> Iterator[tuple[str, nn.Module, object]]:
    """The modules that a frame can see, but for one whose method it is of."""
    read = ((name, frame.f_globals.get(name)) for name in frame.f_code.co_names)
    for name, value in [*frame.f_locals.items(), *read]:
        if isinstance(value, nn.Module) and name != "self":
            yield name, value, None
        elif not isinstance(value, (nn.Module, ModuleType, type)):
            parts = [*getattr(value, "__dict__", {}).items()]
            yield from ((f"{name}.{key}", one, value) for key, one in parts if isinstance(one, nn.Module))


def where_held(found: Held, scene: Scene) -> Fix:
    """The move of a module: where it is made, if the target is known there, or before it is used."""
    for line, statement, name in _makings(found):
        device = device_at(line, scene)
        fix = after(line, statement, f"{name} = {name}.to({device})")
        if fix.where and not is_hard(device, scene):
            return fix
    line = line_of(found.frame.f_code.co_filename, found.number)
    device = device_in(found.frame, found.number, scene)
    return before(line, f"{found.module}.to({device})", found.module.partition(".")[0])


def _makings(found: Held) -> Iterator[tuple[Line, ast.stmt, str]]:
    """The statement that gives a module its name, the line of it, and the name there; of an attribute the only one."""
    path, name = found.frame.f_code.co_filename, found.module
    if found.holder is not None:
        key = name.rpartition(".")[2]
        inside = written_in(type(found.holder))
        every: list[Any] = [(line.path, one) for line, node in inside for one in assignments([node], key)]
        for file, one in every if len(every) == 1 else ():
            target = one.targets[0] if isinstance(one, ast.Assign) else one.target
            yield line_of(file, one.lineno), one, ast.unparse(target)
        return
    line = line_of(path, found.number)
    sets = (set_before(line, near, ast.Name(name)) for near in [*statements_at(line)[-1:], *functions_of(line)])
    yield from ((line_of(path, made.lineno), made, name) for made in islice(filter(None, sets), 1))
