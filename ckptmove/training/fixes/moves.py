"""Fixes that move a tensor where the user's code has it: in a variable, in a container, or in an object with ``to``."""

from __future__ import annotations

import ast
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from ckptmove.training.code.calls import device_parameter, is_assignable, is_expression, variables
from ckptmove.training.code.containers import Move, assignment, attributes_of, moved, ways
from ckptmove.training.code.source import (
    SCOPES,
    callee,
    earlier,
    function_of,
    head_of,
    name_of_module,
    nodes_of,
    parents,
    sets,
    since_set,
    tree_of,
)
from ckptmove.training.code.tensor_names import OF_MODULES
from ckptmove.training.code.watch import are_rows, is_target, targets_in
from ckptmove.training.fixes.edits import (
    MOVES,
    NO_FIX,
    Fix,
    before,
    is_written,
    reads,
    with_expression,
    with_move,
)
from ckptmove.training.fixes.producers import where_returned
from ckptmove.training.fixes.scene import device_expression, device_in, is_fixed, is_set_before

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptmove.training.code.source import Running
    from ckptmove.training.fixes.scene import Scene

#: Attributes of a tensor that are the same wherever it is, or that move it.
_ANYWHERE: Final = MOVES | {"cpu", "dim", "dtype", "item", "ndim", "numel", "numpy", "shape", "size", "tolist"}
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
#: Functions that take the lengths of sequences on the CPU.
_PACKERS: Final = frozenset({"ctc_loss", "pack_padded_sequence"})


class _Carrier(NamedTuple):
    """An expression of a frame for a tensor, or for a container or an object that contains it."""

    name: str  # the expression
    value: object
    way: str  # expression for the tensor
    is_assignable: bool  # whether `name = …` rebinds it


def where_used(
    lineage: Sequence[torch.Tensor], frames: Sequence[Running], scene: Scene, *more: str
) -> tuple[str, Fix] | None:
    """Expression for a tensor, and its move; None if no frame has one.

    Args:
        lineage: the tensor, then the tensors that it was made from. The last one that a frame has is moved.
        frames: frames of the user's code, the innermost last. The move is in the outermost that has the tensor.
        more: other expressions for the tensor in the innermost frame.
    """
    every = [
        (carrier, running, None if depth == 0 else lineage[depth - 1], one)
        for depth, one in reversed([*enumerate(lineage)])
        for running in frames
        for carrier in _carriers(one, running, more if depth == 0 and running is frames[-1] else ())
    ]
    for is_any in (False, True):  # the target's own name only if no other expression for it is known
        for carrier, running, rows, one in every:
            is_dataset = rows is not None and are_rows(rows, one)
            if carrier.is_assignable:
                found = None if is_dataset else _rebound(carrier, running, scene)
            else:
                found = _moved_in_line(carrier, running, scene, taken=is_dataset)
            if found is not None and (is_any or not is_fixed(found[1], scene)):
                return carrier.way, found[0]
    return _unread(*every[0][:2], scene) if every else None


def _unread(carrier: _Carrier, running: Running, scene: Scene) -> tuple[str, Fix]:
    """The move of a variable that no statement of its frame reads by its name, as in ``eval``."""
    near, path = running.spot.statement, running.spot.line.path
    words = Fix(f"move {carrier.way} where it is made, for {running.spot.line}: .to(device)")
    if near is None or not carrier.is_assignable:
        return carrier.way, words
    text = assignment(carrier.name, carrier.value, _move(device_before(near, running, scene), running))
    return carrier.way, before(path, near, text) if text else words


def _carriers(tensor: torch.Tensor, running: Running, more: Iterable[str]) -> Iterator[_Carrier]:
    """The expressions of a frame for a tensor, in the order in which they are tried."""
    frame = running.frame
    found = [_Carrier(one.name, tensor, one.name, one.is_assignable) for one in variables(tensor, [running])]
    yield from (_Carrier(one, tensor, one, is_assignable=False) for one in more)
    if isinstance(frame.f_locals.get("self"), nn.Module):  # its attributes are moved in the line that reads them
        yield from (one._replace(is_assignable=False) for one in found if one.name.startswith("self."))
    yield from (one for one in found if one.is_assignable)
    yield from (one for one in found if not one.is_assignable and "." not in one.name)
    kept = attributes_of(frame.f_locals.get("self")).items()
    own = {f"self.{key}": one for key, one in kept if key not in OF_MODULES}
    read = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    held = []
    for name, value in (read | dict(frame.f_locals) | own).items():
        way = next((way for way, one in ways(name, value) if one is tensor), None)
        if way is not None and value is not tensor:
            is_own = name in own and not is_expression(frame)
            is_local = name in frame.f_locals and is_assignable(running, name)
            held.append(_Carrier(name, value, way, is_own or is_local))
    held.sort(key=lambda one: not reads(nodes_of(running.spot), one.name))
    yield from (one for one in held if one.is_assignable)
    yield from (one for one in found if not one.is_assignable and "." in one.name)
    yield from (one for one in held if not one.is_assignable)


def _moved_in_line(carrier: _Carrier, running: Running, scene: Scene, *, taken: bool) -> tuple[Fix, str] | None:
    """The frame's statement with a move of what it reads, or the last earlier one that reads it; and the device."""
    spot, name = running.spot, carrier.name
    device = device_in(running, scene)
    if carrier.way != name:
        whole = moved(name, carrier.value, _move(device, running))
        fix = with_move(spot, [carrier.way], device)
        fix = fix or (with_expression(spot, name, whole) if whole else None)
        return None if fix is None else (fix, device)
    fix = with_move(spot, [name], device, taken=taken)
    if fix is not None:
        return fix, device
    if spot.statement is None or is_written(nodes_of(spot), name):
        return None
    for one in earlier(spot.statement):
        known = device if is_set_before(device, one) else device_expression(one, spot.line.path, scene)
        fix = with_move(spot, [name], known, taken=taken, nodes=list(head_of(one)))
        if fix is not None:
            return fix, known
    return None


def _move(device: str, running: Running) -> Move:
    return Move(f"to({device})", name_of_module(running.spot.line.path, "torch"))


def _rebound(carrier: _Carrier, running: Running, scene: Scene) -> tuple[Fix, str] | None:
    """A statement that moves a variable before the first one that reads it, and the device; None if none reads it."""
    place = _first_read(carrier.name, running)
    if place is None:
        return None
    together = list(_set_together(carrier, running, scene))
    place = min(
        (place, *filter(None, (_first_read(one.name, running) for one in together))), key=lambda one: one.lineno
    )
    returned = where_returned(carrier.name, carrier.value, running, scene)
    if returned is not None:
        return returned
    place = _before_loops(place, carrier.name, running, scene)
    device = device_before(place, running, scene)
    move = _move(device, running)
    texts = {one.name: moved(one.name, one.value, move) for one in together}
    text = f"{', '.join(texts)} = {', '.join(texts.values())}"
    if len(texts) < 2 or not all(texts.values()):
        text = assignment(carrier.name, carrier.value, move)
    fix = before(running.spot.line.path, place, text) if text else NO_FIX
    return (fix, device) if fix.where else None


def _first_read(name: str, running: Running) -> ast.stmt | None:
    """The first statement that reads the value that a variable has at the statement of a frame; None for none."""
    near = running.spot.statement
    if near is None:
        return None
    is_shared = name in running.frame.f_code.co_cellvars
    is_changed = isinstance(near, ast.AugAssign) and ast.unparse(near.target) == name
    place = near if is_shared or is_changed or reads(nodes_of(running.spot), name) else None
    for one in since_set(near, name)[0]:
        place = one if _operands(ast.walk(one), name) else place
    return place


def _operands(nodes: Iterable[ast.AST], name: str) -> list[ast.expr]:
    """The reads of a variable for which it has to be on the target."""
    found = []
    for one in reads([*nodes], name):
        parent: Any = next(parents(one), None)
        is_anywhere = isinstance(parent, ast.Attribute) and parent.attr in _ANYWHERE
        if not is_anywhere and not (isinstance(parent, ast.Call) and callee(parent) in _PACKERS):
            found.append(one)
    return found


def _set_together(carrier: _Carrier, running: Running, scene: Scene) -> Iterator[_Carrier]:
    """The variables with tensors off the target that one statement sets: ``images, labels = batch``."""
    near = running.spot.statement
    setter = None if near is None else since_set(near, carrier.name)[1]
    nodes = [] if setter is None else list(head_of(setter))
    every = (one for one in nodes if isinstance(one, (ast.Tuple, ast.List)) and isinstance(one.ctx, ast.Store))
    around = next((one for one in every if any(ast.unparse(part) == carrier.name for part in one.elts)), None)
    scope = function_of(near) or tree_of(running.spot.line.path)
    for name in map(ast.unparse, [] if around is None else around.elts):
        value = running.frame.f_locals.get(name)
        tensors = [one for _, one in ways(name, value) if isinstance(one, torch.Tensor)]
        is_off = any(one.device != scene.place.device for one in tensors)
        if is_off and is_assignable(running, name) and (name == carrier.name or _operands(ast.walk(scope), name)):
            yield _Carrier(name, value, name, is_assignable=True)


def _before_loops(place: ast.stmt, name: str, running: Running, scene: Scene) -> ast.stmt:
    """The outermost loop around a statement that does not set a variable, if the target is known before it."""
    best = place
    for parent in parents(place):
        if isinstance(parent, SCOPES) or (isinstance(parent, _LOOPS) and sets(ast.walk(parent), name)):
            break
        best = parent if isinstance(parent, _LOOPS) else best
    return place if is_fixed(device_before(best, running, scene), scene) else best


def device_before(place: ast.stmt, running: Running, scene: Scene) -> str:
    """Expression for the target at a statement of a frame, or at an earlier one."""
    frame, spot = running
    named = frame.f_locals.get("device", frame.f_globals.get("device"))
    known = ["device"] if is_target(named, scene.place.device) else []
    known.append(device_parameter(place, spot.line.path, scene.home))
    own, other = targets_in(frame, spot, scene.place.device)
    every = (one for one in chain(known, own, other) if one and is_set_before(one, place))
    return next(every, "") or device_expression(place, spot.line.path, scene)
