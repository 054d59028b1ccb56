"""Fixes for a tensor on the wrong device: an edit of the user's line, or a sentence if none is known."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.verification.case.case_call import (
    device_parameter,
    has_literal_keys,
    is_assignable,
    rebuilt,
    variables,
)
from ckptmove.verification.case.edits import (
    LOADS,
    MOVES,
    NO_FIX,
    Fix,
    after,
    before,
    is_of_torch,
    is_written,
    replaced,
    text_of,
    with_device,
    with_expression,
    with_move,
    with_to,
)
from ckptmove.verification.case.fixes_attributes import as_buffer, as_container, is_in_container
from ckptmove.verification.case.source import (
    SCOPES,
    Running,
    assignment_before,
    callee,
    earlier,
    full_name,
    function_of,
    head_of,
    nodes_of,
    parents,
    read,
    stored,
)
from ckptmove.verification.case.tensor_names import tensors_in
from ckptmove.verification.case.watch import is_target, target_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.verification.case.case_call import Found, Given, UserFrame
    from ckptmove.verification.case.source import Line, Spot
    from ckptmove.verification.case.tensor_names import NamedTensor
    from ckptmove.verification.case.user_code import Entrance
    from ckptmove.verification.case.watch import Origin, Watch
    from ckptmove.verification.place import StepDevice

_LOSSES: Final = "criterion"
#: Functions that make a tensor without a call that ``__torch_function__`` sees, or only with calls of their own.
_UNSEEN: Final = frozenset({"from_numpy", "frombuffer", "from_dlpack", "Tensor", "FloatTensor", "LongTensor", *LOADS})


class Scene(NamedTuple):
    """Facts used to explain a fault.

    Attributes:
        watch: record of the user's calls of torch.
        entrance: knows which files are the user's.
        names: tensors of the case, by identity.
        place: where the step ran.
        home: line to report if no line of the user's code is in the traceback.
        late: the same for optimizer state: the line that moved the model last, or built the optimizer.
        given: arguments of the call of ``Case``; None if unknown.
        early: tensors of the case before the step, by identity.
        built: frames that built each optimizer, by the optimizer's key in the case.
    """

    watch: Watch
    entrance: Entrance
    names: Mapping[int, NamedTensor]
    place: StepDevice
    home: Line
    late: Line
    given: Given | None = None
    early: Mapping[int, NamedTensor] = {}  # never written to
    built: Mapping[str, list[UserFrame]] = {}  # never written to


def device_expression(node: ast.AST | None, path: str, scene: Scene, known: str = "", module: str = "") -> str:
    """Expression for the target at a node: an expression known there, the case's device, or the target's name."""
    return known or device_parameter(node, path, scene.home) or module or _target(scene)


def _target(scene: Scene) -> str:
    return repr(scene.place.device_of(torch.empty(0, device=scene.place.device)))


def is_fixed(device: str, scene: Scene) -> bool:
    """Whether an expression for the target is its name: the edit would fit no other target."""
    return device == _target(scene)


def device_in(running: Running, scene: Scene) -> str:
    """Expression for the target at the statement of a frame."""
    spot = running.spot
    known = target_in(running.frame, spot, scene.place.device)
    return device_expression(spot.statement, spot.line.path, scene, *known)


def where_made(origin: Origin, scene: Scene) -> Fix:
    """The device in the call that made a tensor; a sentence if the import would fail without the target."""
    spot = origin.spot
    device = device_expression(spot.statement, spot.line.path, scene, origin.device, origin.module)
    if origin.at_import and is_fixed(device, scene):
        return Fix(f"move the result of {made_by(origin)} at {spot.line} where it is used: .to(device)")
    loaded = None if _is_direct(origin) else _where_unseen(spot, device)
    fix = loaded or with_device(spot, origin.operation, device)
    return fix if fix.text else Fix(f"move the result of {made_by(origin)} at {spot.line}: .to({device})")


def _is_direct(origin: Origin) -> bool:
    """Whether the user's code calls the operation by its own name."""
    return callee(origin.spot.node) == origin.operation.rpartition(".")[2]


def made_by(origin: Origin) -> str:
    """The function that the user's code called to make a tensor: ``torch.load``, not the operation inside it."""
    calls = [] if _is_direct(origin) else _unseen_calls(origin.spot)
    return next((full_name(origin.spot.line.path, one.func) for one in calls), origin.operation)


def _unseen_calls(spot: Spot) -> list[ast.Call]:
    every = [one for one in nodes_of(spot) if isinstance(one, ast.Call)]
    return [one for one in every if callee(one) in _UNSEEN and is_of_torch(spot.line.path, one)]


def _where_unseen(spot: Spot, device: str) -> Fix | None:
    """Move the results of calls that ``__torch_function__`` does not see.

    ``torch.load`` may return a dict, so only its items and operands are moved.
    """
    nodes, path = nodes_of(spot), spot.line.path
    taken: dict[ast.expr, ast.expr] = {one.value: one for one in nodes if isinstance(one, ast.Subscript)}
    operands = [part for one in nodes if isinstance(one, ast.BinOp) for part in (one.left, one.right)]
    is_moved = [one.value for one in nodes if isinstance(one, ast.Attribute) and one.attr in MOVES]
    changes: list[tuple[ast.expr, str]] = []
    for call in _unseen_calls(spot):
        whole: ast.expr = call
        while whole in taken:
            whole = taken[whole]
        is_sure = callee(call) not in LOADS or whole is not call or call in operands
        if is_sure and whole not in is_moved:
            changes.append((whole, with_to(path, whole, device)))
    fix = replaced(path, *changes) if changes else NO_FIX
    return fix if fix.where else None


def where_called(origin: Origin | None, frames: Sequence[Running], scene: Scene) -> Fix:
    """Fix for a result without a variable: moved after the call, or made on the target where that is known.

    Args:
        origin: of the tensor that it was made from; None if ``__torch_function__`` did not see it.
        frames: frames of the user's code, the innermost last.
        scene: all the rest.
    """
    if origin is not None:
        spot = origin.spot
        if origin.device or device_parameter(spot.statement, spot.line.path, scene.home) or not frames:
            return where_made(origin, scene)
    for running in reversed(frames):
        spot, device = running.spot, device_in(running, scene)
        if origin is None:
            fix = _where_unseen(spot, device)
        else:
            calls = [one for one in nodes_of(spot) if callee(one) == origin.spot.code.co_name]
            changes = [(one, with_to(spot.line.path, one, device)) for one in calls if isinstance(one, ast.Call)]
            fix = replaced(spot.line.path, *changes) if changes else None
        if fix is not None and fix.where:
            return fix
    return Fix(f"move it where it is made{_seen(frames)}: .to(device)") if origin is None else where_made(origin, scene)


def _seen(frames: Sequence[Running]) -> str:
    """The innermost line, for a sentence."""
    return "".join(f", for {running.spot.line}" for running in frames[-1:])


def where_used(
    lineage: Sequence[torch.Tensor], frames: Sequence[Running], scene: Scene, *more: str
) -> tuple[str, Fix] | None:
    """A tensor's variable, and the line that reads it with a move; None if no frame has a variable for it.

    Args:
        lineage: the tensor, then the tensors that it was made from.
        frames: frames of the user's code, the innermost last.
        scene: all the rest.
        more: other expressions for the tensor in the innermost frame.
    """
    first: tuple[Found, str] | None = None
    for depth, one in enumerate(lineage):
        for running in reversed(frames):
            found = list(variables(one, [running]))
            inner = more if depth == 0 and running is frames[-1] else ()
            names = [*(each.name for each in found), *inner]
            device = device_in(running, scene) if names else ""
            fix = with_move(running.spot, names, device, taken=depth > 0)
            if fix is not None:
                return names[0], fix
            if found and first is None:
                first = found[0], device
    return None if first is None else (first[0].name, _where_read_before(*first, scene))


def _where_read_before(found: Found, device: str, scene: Scene) -> Fix:
    """The last earlier statement that reads a variable; a new one if none does or the line writes to the tensor."""
    spot, name = found.running.spot, found.name
    near = spot.statement
    every = [] if near is None or is_written(nodes_of(spot), name) else earlier(near)
    for one in every:
        known = device if _is_set_before(device, one) else device_expression(one, spot.line.path, scene)
        fix = with_move(spot, [name], known, nodes=list(head_of(one)))
        if fix is not None:
            return fix
    words = Fix(f"move {name} where it is made, for {spot.line}: .to(device)")
    return (
        before(spot.line.path, near, f"{name} = {name}.to({device})")
        if found.is_assignable and near is not None
        else words
    )


def _is_set_before(expression: str, statement: ast.stmt) -> bool:
    """Whether every assignment in the function to a variable of an expression is before a statement."""
    function, names = function_of(statement), read(ast.parse(expression, mode="eval"))
    every = [] if function is None else [one for one in ast.walk(function) if isinstance(one, ast.Name)]
    return all(one.id not in names or isinstance(one.ctx, ast.Load) or one.lineno < statement.lineno for one in every)


def of_tensor(known: NamedTensor, frames: Sequence[Running], root: Origin | None, scene: Scene) -> Fix:
    """Fix for a tensor of the case."""
    if known.kind == "attribute":
        if root is not None and id(known.tensor) not in scene.early and scene.early:  # made in the step, and kept
            fix = where_made(root, scene)
            used = None if fix.where else where_used([known.tensor], frames, scene, _of_self(known))
            return fix if used is None else used[1]
        return _of_attribute(known, frames, root, scene)
    if known.kind == "batch":
        return _of_batch(known, frames, scene)
    if known.kind == "criterion":
        return _of_loss(known, root, scene)
    if known.kind == "state" and isinstance(known.tensor, torch.nn.Parameter):
        built = scene.built.get(known.optimizer)
        line = built[0].spot.line if built else scene.home
        return Fix(f"make {known.name} on the device, before the optimizer is built at {line}")
    return model_first(scene, known)


def _of_attribute(known: NamedTensor, frames: Sequence[Running], root: Origin | None, scene: Scene) -> Fix:
    """Fix for an attribute of a module: a buffer, a list of torch's, or a move in the line that uses it."""
    is_one = isinstance(known.held, torch.Tensor)
    fix = as_buffer(known, root) if is_one else None if is_in_container(known) else as_container(known, root)
    if fix is not None:
        return fix
    used = where_used([known.tensor], frames, scene, _of_self(known))
    if used is not None and used[1].where:
        return used[1]
    is_kept = is_in_container(known) and not is_one and has_literal_keys(known.held, known.tensor)
    for frame, spot in reversed(frames):
        if frame.f_locals.get("self") is known.holder and is_kept and spot.statement is not None:
            device = device_in(Running(frame, spot), scene)
            name, held = f"self.{known.key}", known.held
            every = f"{{key: one.to({device}) for key, one in {name}.items()}}"
            value = every if isinstance(held, Mapping) else rebuilt(name, held, known.tensor, device)
            return before(spot.line.path, spot.statement, f"{name} = {value}")
    if is_in_container(known) and not is_one:
        return Fix(f"move {known.name} before it is used{_seen(frames)}: .to(device)")
    what = "a buffer" if is_one else "a part of the model"
    return Fix(f"make {known.name} {what} where it is first assigned{_seen(frames)}")


def _of_self(known: NamedTensor) -> str:
    """Expression for a tensor of an attribute in the methods of its module."""
    return f"self.{known.key}{known.name.rpartition(f'.{known.key}')[2]}"


def model_first(scene: Scene, known: NamedTensor) -> Fix:
    """Move of the model that a tensor belongs to, before its optimizer is built."""
    given = None if scene.given is None else scene.given.of_parts(known.model, known.optimizer)
    if given is None or given.model is None:
        name = known.model or "model"
        return Fix(f"{name} = {name}.to(device), before the optimizer is built, in the case at {scene.home}")
    name = text_of(given.path, given.model)
    every = list(_before_which(given, name, scene.built.get(known.optimizer, [])))
    device = _device_at(every[0], given, scene)
    if not isinstance(given.model, (ast.Name, ast.Attribute)):
        return replaced(given.path, (given.model, with_to(given.path, given.model, device)))
    text = f"{name} = {name}.to({device})"
    fixes = (before(given.path, one, text) for one in every)
    words = Fix(f"{text}, before the optimizer is built, in the case at {given.line}")
    return next((fix for fix in fixes if fix.where), words)


def _device_at(statement: ast.stmt, given: Given, scene: Scene) -> str:
    """Expression for the target at a statement of the function that calls ``Case``."""
    devices = given.frame.devices.items()
    named = (name for name, one in devices if is_target(one, scene.place.device) and _is_set_before(name, statement))
    return device_expression(statement, given.path, scene, module=next(named, ""))


def _before_which(given: Given, name: str, built: list[UserFrame]) -> Iterator[ast.stmt]:
    """Statements that ``model.to(device)`` can precede: where the optimizer is built, else the call of ``Case``."""
    model = given.frame.modules.get(name, lambda: None)()
    for frame in built:
        then, builder = frame.modules.get(name, lambda: None)(), frame.spot.statement
        if frame.spot.code is given.frame.spot.code and builder is not None and then is not None and then is model:
            around = [one for one in parents(builder) if isinstance(one, ast.stmt)]
            outer = takewhile(lambda one: not isinstance(one, SCOPES) and name not in stored(one), around)
            yield [builder, *outer][-1]
    yield given.statement


def _of_batch(known: NamedTensor, frames: Sequence[Running], scene: Scene) -> Fix:
    """Move of a tensor of the batch, or of what contains it, where the step has it."""
    for running in frames:
        path, near = running.spot.line.path, running.spot.statement
        is_named = is_target(running.frame.f_locals.get("device"), scene.place.device)
        device = "device" if is_named else device_parameter(near, path, scene.home) or device_in(running, scene)
        found = list(variables(known.tensor, [running]))
        used = [one.name for one in found if one.is_assignable and _is_used(running, one.name)]
        fix = NO_FIX if not used or near is None else before(path, near, f"{used[0]} = {used[0]}.to({device})")
        if fix.where:
            return fix
        other = with_move(running.spot, [one.name for one in found], device)
        other = other or _of_container(known, running, device)
        if other is not None:
            return other
    return Fix(f"move {known.name} in the step{_seen(frames)}: .to(device)")


def _is_used(running: Running, name: str) -> bool:
    """Whether a variable's new value would be read: by the frame's statement, or by a function that shares it."""
    is_shared = "." in name or name in running.frame.f_code.co_cellvars
    return is_shared or (running.spot.statement is not None and name in read(running.spot.statement))


def _of_container(known: NamedTensor, running: Running, device: str) -> Fix | None:
    """Move of a tensor in a tuple, list or dict of a frame."""
    spot = running.spot
    for name, value in list(running.frame.f_locals.items()):
        is_container = isinstance(value, (Mapping, tuple, list))
        way = next((way for way, one in tensors_in(value, name) if one is known.tensor), None) if is_container else None
        if way is None or not has_literal_keys(value, known.tensor):
            continue
        fix = with_move(spot, [way], device)
        if fix is not None:
            return fix
        whole = rebuilt(name, value, known.tensor, device)
        if not is_assignable(running, name):
            return with_expression(spot, name, whole)
        if spot.statement is None or not _is_used(running, name):
            continue
        is_settable = isinstance(_holder(value, known.tensor), (Mapping, list))
        text = f"{way} = {way}.to({device})" if is_settable else f"{name} = {whole}"
        fix = before(spot.line.path, spot.statement, text)
        return fix if fix.where else None
    return None


def _holder(value: Any, tensor: torch.Tensor) -> Any:
    """The innermost container of a tensor."""
    for one in value.values() if isinstance(value, Mapping) else value:
        if one is not tensor and any(part is tensor for _, part in tensors_in(one)):
            return _holder(one, tensor)
    return value


def _of_loss(known: NamedTensor, root: Origin | None, scene: Scene) -> Fix:
    """Move of the whole loss if it is a module; else of its tensor, where that is made."""
    is_module = known.holder is not None
    if not is_module and root is not None:
        fix = where_made(root, scene)
        if fix.where or not root.at_import:
            return fix
    given = scene.given
    below = "" if is_module else known.name.removeprefix(_LOSSES)
    if given is None or given.criterion is None:
        name = known.name if below else _LOSSES
        return Fix(f"{name} = {name}.to(device), in the case at {scene.home}")
    name = ast.unparse(given.criterion)
    built = assignment_before(given.statement, name)
    device = _device_at(built or given.statement, given, scene)
    text = f"{name}{below} = {name}{below}.to({device})"
    if built is not None:
        fix = after(given.path, built, text)
        return fix if fix.where else before(given.path, given.statement, text)
    if is_module:
        return replaced(given.path, (given.criterion, with_to(given.path, given.criterion, device)))
    return Fix(f"make {known.name} on the device passed to the function, for {given.line}")
