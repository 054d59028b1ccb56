"""Fixes for a tensor on the wrong device: an edit of the user's line, or a sentence if none is known."""

from __future__ import annotations

import ast
from itertools import takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ckptmove.training.code.calls import device_parameter
from ckptmove.training.code.source import (
    SCOPES,
    callee,
    full_name,
    function_of,
    nodes_of,
    parents,
    read,
    stored,
)
from ckptmove.training.code.watch import is_passed, is_target, target_in
from ckptmove.training.fixes.edits import (
    LOADS,
    MOVES,
    NO_FIX,
    Fix,
    before,
    is_of_torch,
    operand,
    replaced,
    text_of,
    with_device,
    with_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ckptmove.proof.place import StepDevice
    from ckptmove.training.code.calls import Given, UserFrame
    from ckptmove.training.code.entrance import Entrance
    from ckptmove.training.code.source import Line, Running, Spot
    from ckptmove.training.code.tensor_names import NamedTensor
    from ckptmove.training.code.watch import Origin, Watch

#: Functions that make a tensor without a call that ``__torch_function__`` sees, or only with calls of their own.
_UNSEEN: Final = frozenset({"from_numpy", "frombuffer", "from_dlpack", "Tensor", "FloatTensor", "LongTensor", *LOADS})


class Scene(NamedTuple):
    """Facts used to explain a fault."""

    watch: Watch  # record of the user's calls of torch
    entrance: Entrance  # knows which files are the user's
    names: Mapping[int, NamedTensor]  # tensors of the case, by identity
    place: StepDevice  # where the step ran
    home: Line  # line to report if no line of the user's code is in the traceback; number 0 for no case function
    late: Line  # the same for optimizer state: the line that moved the model last, or built the optimizer
    given: Given | None = None  # arguments of the call of `Case`; None if unknown
    #: tensors of the case before the step, by identity.
    early: Mapping[int, NamedTensor] = {}  # never written to
    #: frames that built each optimizer, by the optimizer's key in the case.
    built: Mapping[str, list[UserFrame]] = {}  # never written to

    @property
    def in_case(self) -> str:
        """The end of a sentence that names the case function; empty for a script."""
        return f", in the case at {self.home}" if self.home.number else ""


def device_expression(node: ast.AST | None, path: str, scene: Scene, known: str = "", module: str = "") -> str:
    """Expression for the target at a node: an expression known there, the case's device, or the target's name."""
    return known or device_parameter(node, path, scene.home) or module or target_name(scene)


def target_name(scene: Scene) -> str:
    """The target's name as an expression: ``'cuda:0'``."""
    return repr(scene.place.device_of(torch.empty(0, device=scene.place.device)))


def is_fixed(device: str, scene: Scene) -> bool:
    """Whether an expression for the target is its name: the edit would fit no other target."""
    return device == target_name(scene)


def device_in(running: Running, scene: Scene) -> str:
    """Expression for the target at the statement of a frame."""
    spot = running.spot
    known = target_in(running.frame, spot, scene.place.device)
    return device_expression(spot.statement, spot.line.path, scene, *known)


def where_made(origin: Origin, scene: Scene) -> Fix:
    """The device in the call that made a tensor; a sentence if the import would fail without the target."""
    spot, call = origin.spot, origin.spot.node
    if is_brought_back(origin) and isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        return replaced(spot.line.path, (call, operand(spot.line.path, call.func.value)))
    device = device_expression(spot.statement, spot.line.path, scene, origin.device, origin.module)
    if origin.at_import and is_fixed(device, scene):
        return Fix(f"move the result of {made_by(origin)} at {spot.line} where it is used: .to(device)")
    loaded = None if _is_direct(origin) else _where_unseen(spot, device)
    fix = loaded or with_device(spot, origin.operation, device)
    return fix if fix.text else Fix(f"move the result of {made_by(origin)} at {spot.line}: .to({device})")


def knows_target(origin: Origin, scene: Scene) -> bool:
    """Whether the call that made a tensor can be given the target by an expression that is known there."""
    spot = origin.spot
    known = origin.device or origin.module or device_parameter(spot.statement, spot.line.path, scene.home)
    return bool(known) and _is_direct(origin) and not origin.operation.startswith("torch.Tensor.")


def is_brought_back(origin: Origin) -> bool:
    """Whether a call of the user's, and nothing else in it, moved a tensor from the target: ``x.cpu()``."""
    call = origin.spot.node
    given = [*getattr(call, "args", ()), *getattr(call, "keywords", ())]
    is_move = origin.operation == "torch.Tensor.cpu" or (origin.operation == "torch.Tensor.to" and len(given) == 1)
    return is_move and _is_direct(origin) and origin.parent is None


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
    """
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
    return (
        Fix(f"move it where it is made{seen_at(frames)}: .to(device)") if origin is None else where_made(origin, scene)
    )


def seen_at(frames: Sequence[Running]) -> str:
    """The innermost line, for a sentence."""
    return "".join(f", for {running.spot.line}" for running in frames[-1:])


def is_set_before(expression: str, statement: ast.stmt) -> bool:
    """Whether every assignment in the function, or the module, to a variable of an expression is before a statement."""
    function, names = function_of(statement), read(ast.parse(expression, mode="eval"))
    whole = [statement, *parents(statement)][-1] if function is None else function
    every = [one for one in ast.walk(whole) if isinstance(one, ast.Name)]
    every = [one for one in every if function is not None or function_of(one) is None]
    return all(one.id not in names or isinstance(one.ctx, ast.Load) or one.lineno < statement.lineno for one in every)


def model_first(scene: Scene, known: NamedTensor) -> Fix:
    """Move of the model that a tensor belongs to, before its optimizer is built."""
    given = None if scene.given is None else scene.given.of_parts(known.model, known.optimizer)
    if given is None or given.model is None:
        name = known.model or "model"
        return Fix(f"{name} = {name}.to(device), before the optimizer is built{scene.in_case}")
    built = scene.built.get(known.optimizer, [])
    fixes = [(*_model_moved(one, built, scene), one.path) for one in (given, *_outer(given, built))]
    sure = [(fix, is_passed(path, device)) for fix, device, path in fixes if not is_fixed(device, scene)]
    best = [fix for fix, is_given in sure if is_given]  # not a parameter that names the type of the device alone
    return [*best, *(fix for fix, _ in sure), fixes[0][0]][0]


def _outer(given: Given, built: list[UserFrame]) -> Iterator[Given]:
    """The callers of the function that built an optimizer, for an optimizer that a method of the model built."""
    model = given.frame.modules.get(ast.unparse(given.model or ast.Name("")), lambda: None)()
    for frame in built:
        names = [name for name, one in frame.modules.items() if name != "self" and one() is model is not None]
        if frame.spot.statement is not None and names:
            name = ast.parse(names[0], mode="eval").body
            yield given._replace(frame=frame, statement=frame.spot.statement, model=name)


def _model_moved(given: Given, built: list[UserFrame], scene: Scene) -> tuple[Fix, str]:
    """Move of a model before its optimizer is built, and the device."""
    model = given.model or ast.Name("")
    name = text_of(given.path, model)
    every = list(_before_which(given, name, built))
    device = device_at(every[0], given, scene)
    if not isinstance(model, (ast.Name, ast.Attribute)):
        return replaced(given.path, (model, with_to(given.path, model, device))), device
    text = f"self.to({device})" if name == "self" else f"{name} = {name}.to({device})"
    fixes = (before(given.path, one, text) for one in every)
    words = Fix(f"{text}, before the optimizer is built, in the case at {given.line}")
    return next((fix for fix in fixes if fix.where), words), device


def device_at(statement: ast.stmt, given: Given, scene: Scene) -> str:
    """Expression for the target at a statement of the function that calls ``Case``."""
    devices = given.frame.devices.items()
    named = [name for name, one in devices if is_target(one, scene.place.device) and is_set_before(name, statement)]
    named.sort(key=lambda name: not is_passed(given.path, name))
    return device_expression(statement, given.path, scene, module=next(iter(named), ""))


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
