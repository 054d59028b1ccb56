"""From an exception in the user's step to the tensor, the operation, the line, and what mends it.

Never runs the user's code again: everything is read off the frames that the exception has left.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from ckptmove.verification.simulated_rules import CrossDeviceError, WrongGradient
from ckptmove.verification.user_code import (
    assigned,
    assignments,
    callee,
    criterion_of,
    line_of,
    nodes_of,
    statements,
    tree_of,
    with_device,
    with_move,
)
from ckptmove.verification.watch import on_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from ckptmove.verification.place import Place
    from ckptmove.verification.tensor_names import NamedTensor
    from ckptmove.verification.user_code import Entrance, Line
    from ckptmove.verification.watch import Origin, Watch

#: What torch's own refusals of operands on two devices have in common, over its versions.
_TWO_DEVICES: Final = re.compile(
    r"same device|expected device|on different devices|and weight type|is on (?:cpu|CPU)|on MPS device!"
)
#: What runs the autograd engine, in which many operations are made.
_BACKWARD: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad"})
#: What torch says of a ``.cuda()`` where no CUDA device is: a build without it, and one with it that finds no driver.
_NO_CUDA: Final = ("not compiled with CUDA", "Found no NVIDIA driver")
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Blame:
    """What is wrong with a step.

    Attributes:
        fault: in one line.
        fix: the line that mends it; empty where none is known.
        figures: the same by name.
    """

    fault: str
    fix: str = ""
    figures: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.fault + (f"; fix: {self.fix}" if self.fix else "")


class Scene(NamedTuple):
    """All that a fault is read from.

    Attributes:
        watch: what was seen while the code ran.
        entrance: tells the user's frames.
        names: of the tensors of the case, by identity.
        place: where it ran.
        home: the line to speak of where the user's code is not on the way to the fault.
        late: the line that moved the model last, or built the optimizer: to speak of where state is at fault.
    """

    watch: Watch
    entrance: Entrance
    names: Mapping[int, NamedTensor]
    place: Place
    home: Line
    late: Line


def blame(error: BaseException, scene: Scene) -> Blame:
    """Say what an exception is about."""
    for one in _causes(error):
        if isinstance(one, WrongGradient):
            return _of_gradient(one, scene)
        refusal = next((refusal for refusal in reversed(scene.watch.refusals) if refusal.error is one), None)
        strays = one.strays if isinstance(one, CrossDeviceError) else () if refusal is None else refusal.strays
        if strays and (isinstance(one, CrossDeviceError) or _TWO_DEVICES.search(str(one))):
            if refusal is not None and not any(_is_known(stray, scene) for stray in strays):
                strays = refusal.strays or strays  # what was handed to a function whose inside refused
            aten = one.operation if isinstance(one, CrossDeviceError) else ""
            operation = refusal.operation if refusal is not None else aten
            if isinstance(one, CrossDeviceError) and operation in _BACKWARD:
                operation = f"{aten} in {operation}" + f" ({one.node})" * bool(one.node)
            return _of_strays(one, strays, operation, aten, scene)
    frames = scene.entrance.frames(error.__traceback__)
    line = line_of(frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else scene.home
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    fix = "take the device that the function is given" if any(words in text for words in _NO_CUDA) else ""
    return Blame(f"{text}, {_at(line)}", fix, {"error": text, **place_of(line)})


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from, or in the handling of."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _of_strays(
    error: BaseException, strays: tuple[torch.Tensor, ...], operation: str, aten: str, scene: Scene
) -> Blame:
    frames = scene.entrance.frames(error.__traceback__)
    culprits = list({one.name: one for one in (_culprit(stray, frames, scene) for stray in strays)}.values())
    first = culprits[0]
    made_by = error.made_by if isinstance(error, CrossDeviceError) else ()
    own = [*((frame.f_code.co_filename, number) for frame, number in frames)]
    own += [(file, number) for file, number in made_by if scene.entrance.is_own(file)]
    line = line_of(*own[-1]) if own else first.made or first.at or scene.home
    device = scene.place.device_of(strays[0])
    home = scene.place.device_of(torch.empty(0, device=scene.place.device))
    named = " and ".join(one.name for one in culprits[:_NAMED])
    named += f" and {len(culprits) - _NAMED} more" * (len(culprits) > _NAMED)
    verb = "is" if len(culprits) == 1 else "are"
    through = f" (through {first.through})" * bool(first.through)
    fault = f"{named}{through} {verb} on {device}, and meets {home} in {operation}, {_at(line)}"
    made = f"; made at {first.made}: {first.made.source}" if first.made is not None and first.made != line else ""
    figures: dict[str, object] = {
        "tensor": first.name,
        "tensors": [one.name for one in culprits],
        "on": device,
        "operation": operation,
        "aten": aten,
        **place_of(line),
        "made_at": str(first.made or ""),
        "fix": first.fix,
        "error": " ".join(f"{type(error).__name__}: {error}".split()),
    }
    return Blame(fault.replace("meets", "meets" if len(culprits) == 1 else "meet") + made, first.fix, figures)


def _of_gradient(error: WrongGradient, scene: Scene) -> Blame:
    """What a function of the user's returned in ``backward``: no operation meets it, but torch wants it elsewhere."""
    line = _returning(*error.home) if error.home is not None else scene.home
    made = f"gradient {error.index} of {error.function}.backward"
    wanted, device = error.devices
    fix = _returned(line, error.argument)
    figures: dict[str, object] = {
        "tensor": made,
        "on": device,
        "operation": f"torch.autograd.Function {error.function}",
        **place_of(line),
        "fix": fix,
        "error": f"RuntimeError: {error}",
    }
    return Blame(f"{made} is on {device}, and its input is on {wanted}, {_at(line)}", fix, figures)


def _returning(file: str, first: int) -> Line:
    """The line with the one return of a function of the user's; where there are several, that of its ``def``."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef) and first in {node.lineno, *(one.lineno for one in node.decorator_list)}:
            lines = [one.lineno for one in ast.walk(node) if isinstance(one, ast.Return)]
            return line_of(file, lines[0] if len(lines) == 1 else node.lineno)
    return line_of(file, first)


def _returned(line: Line, gradient: str) -> str:
    """The user's line with what it returns moved to where a gradient is, or what to do in its place."""
    if not gradient:
        return "return it on the device of the gradient that backward is given"
    device = f"{gradient}.device"
    try:
        (statement,) = ast.parse(line.source).body
    except (SyntaxError, ValueError):  # a part of a longer statement, or the head of a function
        statement = None
    if isinstance(statement, ast.Return) and statement.value is not None and not isinstance(statement.value, ast.Tuple):
        attribute = ast.Attribute(statement.value, "to", ast.Load())
        moved = ast.Call(attribute, [ast.parse(device, mode="eval").body], [])
        return f"return {ast.unparse(moved)}"
    return f"return it where the input is: .to({device})"


def _is_known(stray: torch.Tensor, scene: Scene) -> bool:
    """Whether there is something to say of a tensor but its variable."""
    return any(id(one) in scene.names or scene.watch.origin(one) is not None for one in scene.watch.lineage(stray))


class _Culprit(NamedTuple):
    """A tensor at fault.

    Attributes:
        name: what the user calls it.
        fix: the line that mends it.
        made: the line that made it, where that is known.
        through: what was made of it before it was refused.
        at: the line that it is to be mended at, where that is known.
    """

    name: str
    fix: str
    made: Line | None = None
    through: str = ""
    at: Line | None = None


def _culprit(stray: torch.Tensor, frames: list[tuple[FrameType, int]], scene: Scene) -> _Culprit:
    lineage = list(scene.watch.lineage(stray))
    operations = [origin.operation for one in lineage[:-1] if (origin := scene.watch.origin(one)) is not None]
    through = operations[-1].rpartition(".")[2] if operations else ""
    known = next((found for one in lineage if (found := scene.names.get(id(one))) is not None), None)
    root = scene.watch.origin(lineage[-1])
    made = None if root is None else root.line
    beside = (on_target(frames[-1][0], scene.place.device) if frames else "") or "device"
    if known is not None:
        is_itself = known.tensor is stray or known.tensor is stray._base  # noqa: SLF001  # no public name for it
        fix = _fix_of(known, frames, root, scene)
        at = scene.late if known.kind == "state" else None
        return _Culprit(known.name, fix, made, "" if is_itself else through, at)
    owners = [frame for frame, _ in frames if root is not None and frame.f_code is root.code]
    variable = next((found for one in lineage for found in _variables(one, frames[::-1])), None)
    if root is not None and owners:
        name = variable if variable is not None else f"the tensor of {root.operation}"
        return _Culprit(name, with_device(root.line, root.operation, root.beside or beside), made)
    if variable is not None:
        line = line_of(frames[-1][0].f_code.co_filename, frames[-1][1])
        return _Culprit(variable, with_move(line, variable, beside), made)
    name = f"a tensor that {through or (root.operation if root is not None else 'your code')} made"
    own = _variable_of(root) if root is not None and len(lineage) == 1 else ""
    if root is not None and (own or root.beside):
        return _Culprit(own or name, with_device(root.line, root.operation, root.beside or "device"), made)
    return _Culprit(name, f"move it where it is made: .to({beside})", made)


def _fix_of(known: NamedTensor, frames: list[tuple[FrameType, int]], root: Origin | None, scene: Scene) -> str:
    """The line that mends a tensor of the case."""
    if known.kind == "attribute":
        has_nn = not frames or any(frame.f_globals.get("nn") is nn for frame, _ in frames)
        is_one = isinstance(known.held, torch.Tensor)
        return _as_buffer(known, root) if is_one else _as_container(known, "nn" if has_nn else "torch.nn")
    if known.kind == "batch":
        name = next(_variables(known.tensor, frames[:1]), known.name)
        return f"{name} = {name}.to(device)"
    if known.kind == "criterion" and known.holder is None:
        words = f"make {known.name} on the device that the function is given"
        return words if root is None else with_device(root.line, root.operation, root.beside or "device")
    if known.kind == "criterion":
        own = (name for name in _variables(known.holder, frames) if name != "self")
        name = next(own, "") or criterion_of(scene.home)
        return f"{name} = {name}.to(device)"
    return {
        "model": "model = model.to(device), before the optimizer is built and its state is loaded",
        "state": "model = model.to(device) first, then optimizer.load_state_dict(...): state goes where parameters are",
    }[known.kind]


def _as_buffer(known: NamedTensor, root: Origin | None) -> str:
    """The assignment of an attribute as one of a buffer."""
    here = [] if root is None else list(assignments(statements(root.line), known.key))
    sets = here or list(assignments(nodes_of(type(known.holder)), known.key))
    if len(sets) != 1:
        return f"make {known.name} a buffer where it is first assigned, with register_buffer and persistent=False"
    return f"{sets[0][0]}.register_buffer({known.key!r}, {sets[0][1]}, persistent=False)"


def _as_container(known: NamedTensor, prefix: str) -> str:
    """A plain list or dict as one of torch's, which a module knows; in words where there is none for what it holds."""
    held: Any = known.held
    is_dict, name = isinstance(held, Mapping), f"self.{known.key}"
    values = list(held.values() if is_dict else held)
    of_modules: Any = nn.ModuleDict if is_dict else nn.ModuleList
    of_parameters: Any = nn.ParameterDict if is_dict else nn.ParameterList
    for part, kind in ((nn.Module, of_modules), (nn.Parameter, of_parameters)):
        if all(isinstance(value, part) for value in values):
            with suppress(KeyError, TypeError):  # of a dict: a key that no attribute can have
                kind(held)
                return f"{name} = {prefix}.{kind.__name__}({name})"
    plain = f"a plain {type(held).__name__} does not move with the model"
    if all(isinstance(value, torch.Tensor) for value in values):
        return f"register each tensor of {name} as a buffer: {plain}"
    return f"hold what is in {name} in {prefix}.ModuleList or {prefix}.ModuleDict: {plain}"


def _variables(sought: object, frames: list[tuple[FrameType, int]]) -> Iterator[str]:
    """What something is called in frames: variables, attributes of ``self``, and globals."""
    for frame, _ in frames:
        used = [(name, frame.f_globals.get(name)) for name in frame.f_code.co_names]
        inside = getattr(frame.f_locals.get("self"), "__dict__", {})
        attributes = [(f"self.{name}", value) for name, value in inside.items()]
        for name, value in (*frame.f_locals.items(), *attributes, *used):
            if value is sought:
                yield name


def _variable_of(root: Origin) -> str:
    """The variable that the user's line has given a tensor to that it made."""
    for target, value in filter(None, map(assigned, statements(root.line))):
        if isinstance(target, ast.Name) and callee(value) == root.operation.rpartition(".")[2]:
            return target.id
    return ""


def _at(line: Line) -> str:
    return f"at {line}: {line.source}" if line.source else f"at {line}"


def place_of(line: Line) -> dict[str, object]:
    """A line by its parts, as evidence."""
    return {"file": line.file, "line": line.number, "source": line.source}
