"""Fixes for the tensors of a case, by their kind: of the model, the loss, the batch, or the optimizer's state."""

from __future__ import annotations

import ast
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from ckptmove.training.code.containers import MAPPINGS
from ckptmove.training.code.source import (
    assigned,
    assignment_before,
    attribute_assignments,
    block_of,
    callee,
    function_of,
    name_of_module,
    nodes_of_class,
    parents,
)
from ckptmove.training.code.tensor_names import tensors_in
from ckptmove.training.fixes.edits import Fix, after, before, replaced, text_of, with_to
from ckptmove.training.fixes.moves import where_used
from ckptmove.training.fixes.scene import (
    device_at,
    is_brought_back,
    knows_target,
    model_first,
    seen_at,
    where_made,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckptmove.training.code.source import Running
    from ckptmove.training.code.tensor_names import NamedTensor
    from ckptmove.training.code.watch import Origin
    from ckptmove.training.fixes.scene import Scene

_LOSSES: Final = "criterion"
#: Number of methods that read an attribute from which on it is mended where it is made.
_SEVERAL: Final = 2
#: Comment after a line that registers a part of the model that the checkpoint lacks.
_NOTE: Final = "  # not in the checkpoint, because it was never registered: train and save again"


def of_tensor(
    known: NamedTensor, lineage: Sequence[torch.Tensor], frames: Sequence[Running], root: Origin | None, scene: Scene
) -> Fix:
    """Fix for a tensor of the case.

    Args:
        lineage: the tensor at fault, then those that it was made from; one of them is the tensor of the case.
        frames: frames of the user's code, the innermost last.
        root: origin of the last tensor of the lineage; None if unknown.
    """
    if known.kind == "attribute":
        if root is not None and id(known.tensor) not in scene.early and scene.early:  # made in the step, and kept
            fix = where_made(root, scene)
            used = None if fix.where else where_used([known.tensor], frames, scene, _of_self(known))
            return fix if used is None else used[1]
        return _of_attribute(known, frames, root, scene)
    if known.kind == "batch":
        return _of_batch(known, lineage, frames, scene)
    if known.kind == "criterion":
        return _of_loss(known, root, scene)
    if known.kind == "state" and root is not None and is_brought_back(root):
        return where_made(root, scene)
    return _of_parameter(known, scene)


def _of_batch(known: NamedTensor, lineage: Sequence[torch.Tensor], frames: Sequence[Running], scene: Scene) -> Fix:
    """Move of a tensor of the batch, or of what contains it, where the step has it."""
    own = lineage[: 1 + next(n for n, one in enumerate(lineage) if one is known.tensor)]
    used = where_used(own, frames, scene)
    words = Fix(f"move {known.name} in the step{seen_at(frames)}: .to(device)")
    return used[1] if used is not None and used[1].where else words


def _of_parameter(known: NamedTensor, scene: Scene) -> Fix:
    """Move of the model of a parameter, or of the state of one; a sentence for one that only the optimizer has."""
    if known.kind == "state" and isinstance(known.tensor, torch.nn.Parameter):
        built = scene.built.get(known.optimizer)
        line = built[0].spot.line if built else scene.home
        return Fix(f"make {known.name} on the device, before the optimizer is built at {line}")
    return model_first(scene, known)


def _of_attribute(known: NamedTensor, frames: Sequence[Running], root: Origin | None, scene: Scene) -> Fix:
    """Fix for an attribute of a module: a buffer, a list of torch's, or a move where it is used."""
    is_one = isinstance(known.held, torch.Tensor)
    if is_one and root is not None and _is_set_late(root, known.key, scene):
        return where_made(root, scene)
    fix = as_buffer(known, root) if is_one else None if is_in_container(known) else as_container(known, root)
    fix = fix or (as_declared(known, scene) if is_one else None)
    if fix is not None:
        return fix
    used = where_used([known.tensor], frames, scene, _of_self(known))
    if used is not None and used[1].where:
        return used[1]
    if is_in_container(known) and not is_one:
        return Fix(f"move {known.name} before it is used{seen_at(frames)}: .to(device)")
    what = "a buffer" if is_one else "a part of the model"
    return Fix(f"make {known.name} {what} where it is first assigned{seen_at(frames)}")


def _of_self(known: NamedTensor) -> str:
    """Expression for a tensor of an attribute in the methods of its module."""
    return f"self.{known.key}{known.name.rpartition(f'.{known.key}')[2]}"


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
        return Fix(f"{name} = {name}.to(device){scene.in_case}")
    name = ast.unparse(given.criterion)
    built = assignment_before(given.statement, name)
    device = device_at(built or given.statement, given, scene)
    text = f"{name}{below} = {name}{below}.to({device})"
    if built is not None:
        fix = after(given.path, built, text)
        return fix if fix.where else before(given.path, given.statement, text)
    if is_module:
        return replaced(given.path, (given.criterion, with_to(given.path, given.criterion, device)))
    return Fix(f"make {known.name} on the device passed to the function, for {given.line}")


class _Setting(NamedTuple):
    """An assignment of the attribute."""

    path: str
    statement: ast.stmt

    @property
    def target(self) -> Any:
        return assigned(self.statement)[0]

    @property
    def value(self) -> Any:
        return assigned(self.statement)[1]

    @property
    def function(self) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        return function_of(self.statement)


def _settings(known: NamedTensor, root: Origin | None) -> list[_Setting]:
    """The assignments of the attribute in one function with the line that made the tensor, or else in the class."""
    made = [] if root is None or root.spot.statement is None else [root.spot.statement]
    here = [_Setting(root.spot.line.path, one) for one in attribute_assignments(made, known.key) if root is not None]
    inside = _inside(known)
    same = [one for one in inside if not here or one.function is here[0].function]
    found = {one.statement.lineno: one for one in (*same, *here)}.values()
    return sorted(found, key=lambda one: one.statement.lineno) if here else inside


def _inside(known: NamedTensor) -> list[_Setting]:
    """The assignments of the attribute in the class."""
    nodes = nodes_of_class(type(known.holder))
    return [_Setting(path, one) for path, node in nodes for one in attribute_assignments([node], known.key)]


def _is_in_one(sets: list[_Setting]) -> bool:
    """Whether assignments are in one function."""
    return len({one.function for one in sets}) == 1


def as_buffer(known: NamedTensor, root: Origin | None) -> Fix | None:
    """``register_buffer`` in place of the first assignment of an attribute; None if that may not be the first."""
    sets = _settings(known, root)
    is_of_class = any(known.key in vars(one) for one in type(known.holder).__mro__)
    if is_of_class or not _is_in_one(sets):
        return None
    first = sets[0]
    is_sure = len(sets) == 1 or ast.unparse(first.value) == "None"
    if not is_sure or _is_too_early(first, first.statement) or _is_too_late(first, _inside(known)):
        return None
    of, value = text_of(first.path, first.target.value), text_of(first.path, first.value)
    is_kept = is_updated(known.key, [one for _, one in nodes_of_class(type(known.holder))], first.function)
    given = f"{known.key!r}, {value}" + ", persistent=False" * (not is_kept)
    note = _NOTE * (is_kept and not known.name.startswith("criterion."))
    return _placed(replaced(first.path, (first.statement, f"{of}.register_buffer({given}){note}")))


def as_declared(known: NamedTensor, scene: Scene) -> Fix | None:
    """``register_buffer`` without a value after ``super().__init__()``, for an attribute that several methods read.

    torch takes each tensor that is assigned to the attribute later as the buffer's value. None if it may be assigned
    something else, or before that line.
    """
    every = [(path, one) for path, one in nodes_of_class(type(known.holder)) if scene.entrance.is_own(path)]
    own = [one for _, one in every if isinstance(one, ast.Attribute) and ast.unparse(one) == f"self.{known.key}"]
    written = [one for one in own if not isinstance(one.ctx, ast.Load)]
    readers = {function_of(one) for one in own if isinstance(one.ctx, ast.Load)}
    classes = {next(part for part in parents(one) if isinstance(part, ast.ClassDef)) for one in written}
    is_of_class = any(known.key in vars(one) for one in type(known.holder).__mro__)
    if len(readers) < _SEVERAL or len(classes) != 1 or is_of_class:
        return None
    values = [assigned(next(parents(one)))[1] for one in written]
    is_plain = any(isinstance(one, ast.Constant) and one.value is not None for one in values)  # no value of a buffer
    if is_plain or is_updated(known.key, own, None):
        return None
    begins = [(path, one) for path, one in every if isinstance(one, ast.Expr) and callee(one.value) == "__init__"]
    path, begin = next(((path, one) for path, one in begins if classes & {*parents(one)}), ("", None))
    if begin is None or any(_is_too_early(_Setting(path, begin), one) for one in written):
        return None
    return _placed(after(path, begin, f"self.register_buffer({known.key!r}, None, persistent=False)"))


def _is_set_late(root: Origin, key: str, scene: Scene) -> bool:
    """Whether a tensor is made for an attribute of a model outside of its class, after the model was moved."""
    spot = root.spot
    target = assigned(spot.statement)[0]
    is_outside = isinstance(target, ast.Attribute) and target.attr == key and ast.unparse(target.value) != "self"
    moved = [one for one in scene.watch.moved if one.path == spot.line.path and one.number < spot.line.number]
    return is_outside and bool(moved) and knows_target(root, scene)


def is_updated(key: str, nodes: Iterable[ast.AST], first: ast.AST | None) -> bool:
    """Whether a function of a class, except the first, computes an attribute from its last value: a running mean.

    ``__init__`` does not: what it computes, it computes again.
    """
    own = (one for one in nodes if isinstance(one, ast.Attribute) and one.attr == key)
    functions = ((one, function_of(one)) for one in own)
    return any(
        _is_written(one)
        for one, function in functions
        if function is not first and getattr(function, "name", "") != "__init__"
    )


def _is_written(node: ast.Attribute) -> bool:
    """Whether an expression is assigned, by an item as well, or changed by a method of it: ``self.mean.mul_(2)``."""
    one: Any = node
    while isinstance(one.ctx, ast.Load):
        outer = next(parents(one))
        if not isinstance(outer, (ast.Attribute, ast.Subscript)) or outer.value is not one:
            return False
        if isinstance(outer, ast.Attribute) and outer.attr != "data":
            return not isinstance(outer.ctx, ast.Load) or (outer.attr.endswith("_") and not outer.attr.endswith("__"))
        one = outer
    statement = next(part for part in parents(one) if isinstance(part, ast.stmt))
    is_new = one is node and isinstance(statement, (ast.Assign, ast.AnnAssign))
    return not is_new or _is_change(node, statement)


def _is_change(target: ast.AST, statement: ast.AST) -> bool:
    """Whether a statement that assigns an attribute reads it, too."""
    return sum(ast.unparse(part) == ast.unparse(target) for part in ast.walk(statement)) > 1


def _is_too_early(one: _Setting, node: Any) -> bool:
    """Whether a node of a function precedes its ``super().__init__()``: the module registers nothing until then."""
    calls = [part for part in ast.walk(one.function or one.statement) if isinstance(part, ast.Call)]
    begins = [part.lineno for part in calls if callee(part) == "__init__"]
    return bool(begins) and function_of(node) is one.function and node.lineno < min(begins)


def _is_too_late(one: _Setting, every: list[_Setting]) -> bool:
    """Whether another function may assign the attribute first: any may, unless this one is ``__init__``."""
    changes = {other for other in every if _is_change(other.target, other.statement)}
    others = [other.function for other in every if other.function is not one.function and other not in changes]
    starts = [getattr(function, "name", "__init__") == "__init__" for function in (one.function, *others)]
    return bool(others) and starts != [True, *[False] * len(others)]


def as_container(known: NamedTensor, root: Origin | None) -> Fix | None:
    """``nn.ModuleList`` or the like in place of a plain list or dict; None for one of plain tensors."""
    held: Any = known.held
    sets = _settings(known, root)
    if not _is_in_one(sets):
        return None
    last = sets[-1]
    prefix = _prefix(known.holder, last.path)
    if not prefix:
        return None
    whole = _last_statement(last) if _is_too_early(last, last.statement) else _around(sets)
    name = text_of(last.path, last.target)
    note = _NOTE * (not known.name.startswith("criterion."))
    kind = _kind(held)
    if kind:
        return _placed(after(last.path, whole, f"{name} = {prefix}.{kind}({name}){note}"))
    given = _registered(held, name, prefix)
    if not given:
        return None
    return _placed(after(last.path, _last_statement(last), f"{name}_registered = {prefix}.{given}{note}"))


def _placed(fix: Fix) -> Fix | None:
    return fix if fix.where else None


def _around(sets: list[_Setting]) -> ast.stmt:
    """The innermost statement that contains all assignments, or the last of them if one block contains all."""
    around = [one for one in (sets[-1].statement, *parents(sets[-1].statement)) if isinstance(one, ast.stmt)]
    ways = [{other.statement, *parents(other.statement)} for other in sets]
    return next(one for one in around if all(way.intersection(block_of(one)) for way in ways))


def _prefix(holder: object, path: str) -> str:
    """A file's name for ``torch.nn``; empty if it has none."""
    if getattr(sys.modules.get(type(holder).__module__), "nn", None) is nn:
        return "nn"
    name = name_of_module(path, "torch")
    return f"{name}.nn" if name else ""


def _kind(held: Any) -> str:
    """Name of torch's container for all values of a list or dict; empty for none."""
    is_dict = isinstance(held, MAPPINGS)
    values = list(held.values() if is_dict else held)
    of_modules: Any = nn.ModuleDict if is_dict else nn.ModuleList
    of_parameters: Any = nn.ParameterDict if is_dict else nn.ParameterList
    for part, kind in ((nn.Module, of_modules), (nn.Parameter, of_parameters)):
        if all(isinstance(value, part) for value in values):
            with suppress(KeyError, TypeError):  # a key that is no name of an attribute
                kind(held)
                return str(kind.__name__)
    return ""


def _registered(held: Any, name: str, prefix: str) -> str:
    """Expression that registers the modules or parameters among the values of a list or dict; empty for none."""
    source = f"{name}.values()" if isinstance(held, MAPPINGS) else name
    values = list(held.values() if isinstance(held, MAPPINGS) else held)
    rows = [one for one in values if isinstance(one, (list, tuple))]
    if rows and len(rows) == len(values):
        source, values = f"(one for row in {source} for one in row)", [one for row in rows for one in row]
    for part, kind in ((nn.Module, "Module"), (nn.Parameter, "Parameter")):
        if values and all(isinstance(one, part) for one in values):
            return f"{kind}List({source})"
        if any(isinstance(one, part) for one in values):
            return f"{kind}List(one for one in {source} if isinstance(one, {prefix}.{kind}))"
    return ""


def _last_statement(one: _Setting) -> ast.stmt:
    """The last statement of the function, by which a list may be filled; the assignment itself, outside of one."""
    body = [] if one.function is None else [part for part in one.function.body if not isinstance(part, ast.Return)]
    return body[-1] if body else one.statement


def is_in_container(known: NamedTensor) -> bool:
    """Whether a list or dict contains the tensor itself and it is not a parameter: torch has no list of buffers."""
    is_parameter = isinstance(known.tensor, nn.Parameter)
    return not is_parameter and any(one is known.tensor for _, one in tensors_in(known.held))
