"""What the user's code calls a tensor, what contains it, and the parts of the case."""

from __future__ import annotations

import ast
import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.case import Case
from ckptmove.simulation.replaced import replaced
from ckptmove.training.code.containers import attributes_of
from ckptmove.training.code.source import (
    FUNCTIONS,
    Running,
    assigned,
    assignment_before,
    function_of,
    head_of,
    locals_of,
    nodes_of,
    parameters_of,
    parents,
    spot_of,
    stored,
    stored_by,
)
from ckptmove.training.code.tensor_names import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

    from ckptmove.training.code.entrance import Entrance
    from ckptmove.training.code.source import Line, Spot

_FIELDS: Final = ("model", "optimizer", "criterion", "batch")


class Variable(NamedTuple):
    """A variable of a frame."""

    name: str  # its expression
    is_assignable: bool  # whether `name = …` before the frame's statement rebinds it


def variables(sought: object, frames: Iterable[Running]) -> Iterator[Variable]:
    """Names of an object in frames: variables, attributes of ``self``, globals, and attributes that are read."""
    for running in frames:
        frame = running.frame
        for name, value in frame.f_locals.items():
            if value is sought:
                yield Variable(name, is_assignable(running, name))
        for name, value in attributes_of(frame.f_locals.get("self")).items():
            if value is sought:
                yield Variable(f"self.{name}", is_assignable=not is_expression(frame))
        for name in frame.f_code.co_names:
            if frame.f_globals.get(name) is sought:
                yield Variable(name, is_assignable=False)
        for node in _attributes_of(sought, running):
            yield Variable(ast.unparse(node), is_assignable=False)


def _attributes_of(sought: object, running: Running) -> Iterator[ast.Attribute]:
    """The attributes with an object, of a class as well, that a frame's statement reads. No property is run."""
    frame, spot = running
    for node in nodes_of(spot):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = frame.f_locals.get(node.value.id, frame.f_globals.get(node.value.id))
            kind = owner if isinstance(owner, type) else type(owner)
            if any(one.get(node.attr) is sought for one in (attributes_of(owner), *map(vars, kind.__mro__))):
                yield node


def is_assignable(running: Running, name: str) -> bool:
    """Whether ``name = …`` before a frame's statement rebinds this variable, not a new local one."""
    frame, statement = running
    is_free = name in frame.f_code.co_freevars
    return not is_expression(frame) and not is_free and name not in late_names(statement)


def late_names(spot: Spot) -> set[str]:
    """The names that the statement of a spot assigns itself: before it they may have no value."""
    return set() if spot.statement is None else stored_by(head_of(spot.statement))


def is_expression(frame: FrameType) -> bool:
    """Whether a frame is of a lambda or a comprehension, which contains no statements."""
    return frame.f_code.co_name.startswith("<") and frame.f_code.co_name != "<module>"


def device_parameter(node: ast.AST | None, path: str, home: Line) -> str:
    """The parameter of the case function with the case's device, if a node can read it; else empty."""
    rebound: set[str] = set()
    for function in parents(node):
        if not isinstance(function, FUNCTIONS):
            continue
        rebound |= stored(function)
        given = [*function.args.posonlyargs, *function.args.args]
        lines = {function.lineno, *(one.lineno for one in function.decorator_list)}
        if path == home.path and home.number in lines and given:
            return given[0].arg if given[0].arg not in rebound else ""
        rebound |= parameters_of(function)
    return ""


def required_device(node: ast.AST | None) -> str:
    """``device`` if the function around a node requires a parameter of that name; else empty.

    Its frame is gone, so the value is unknown. A default would be some other device.
    """
    function = function_of(node)
    return "device" if function is not None and "device" in _required(function.args) else ""


def _required(given: ast.arguments) -> set[str]:
    positional = [*given.posonlyargs, *given.args]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    required = [
        *positional[: len(positional) - len(given.defaults)],
        *(one for one, value in keywords if value is None),
    ]
    return {one.arg for one in required}


class UserFrame(NamedTuple):
    """A frame of the user's code at an earlier time, without references to its objects."""

    spot: Spot  # the point that it had reached
    modules: dict[str, weakref.ref[torch.nn.Module]]  # its names of modules
    tensors: frozenset[str]  # its variables that contain tensors, or may yield some
    devices: dict[str, str | torch.device]  # its names of devices, and of strings


def devices_of(name: str, value: object) -> Iterator[tuple[str, object]]:
    """A value and its attribute ``device``, as of ``args``, each with its expression. No property is run."""
    yield name, value
    own = {} if isinstance(value, torch.nn.Module) else getattr(value, "__dict__", {})
    if "device" in own:
        yield f"{name}.device", own["device"]


def user_frames(entrance: Entrance, frame: FrameType | None) -> list[UserFrame]:
    """The frames of the user's code among a frame and its callers, the innermost first."""
    found = []
    while (frame := entrance.caller(frame)) is not None:
        here = locals_of(frame)
        own = {f"self.{key}": one for key, one in attributes_of(here.get("self")).items()}
        named = {**here, **own}
        modules = {name: weakref.ref(one) for name, one in named.items() if isinstance(one, torch.nn.Module)}
        tensors = {name for name, one in named.items() if isinstance(one, Iterator) or any(tensors_in(one))}
        every = (pair for name, one in named.items() for pair in devices_of(name, one))
        devices = {way: one for way, one in every if isinstance(one, (str, torch.device))}
        found.append(UserFrame(spot_of(frame), modules, frozenset(tensors), devices))
        frame = frame.f_back
    return found


class Given(NamedTuple):
    """Arguments of a call of ``Case`` as expressions; None for a missing one."""

    frame: UserFrame  # the frame that made the call
    statement: ast.stmt  # the statement that contains the call
    model: ast.expr | None = None
    optimizer: ast.expr | None = None
    criterion: ast.expr | None = None
    batch: ast.expr | None = None

    @property
    def path(self) -> str:
        """Path of the file."""
        return self.frame.spot.line.path

    @property
    def line(self) -> Line:
        """Line of the call."""
        return self.frame.spot.line

    def of_parts(self, model: str, optimizer: str) -> Given:
        """The arguments for one model and one optimizer of several, by key; an empty key for the only one."""
        return self._replace(model=self._at(self.model, model), optimizer=self._at(self.optimizer, optimizer))

    def _at(self, whole: ast.expr | None, key: str) -> ast.expr | None:
        """Value at a key of a dict display, in the call or in the assignment of its variable."""
        if not key:
            return whole
        made = assignment_before(self.statement, whole.id) if isinstance(whole, ast.Name) else None
        given = whole if made is None else assigned(made)[1]
        if not isinstance(given, ast.Dict):
            return None
        pairs = zip(given.keys, given.values, strict=True)
        return next((one for name, one in pairs if isinstance(name, ast.Constant) and name.value == key), None)


@contextlib.contextmanager
def noted_calls(entrance: Entrance) -> Iterator[dict[int, Given]]:
    """Note the calls of ``Case`` in the user's code, by the identity of the case that they return."""
    init: Any = Case.__init__
    calls: dict[int, Given] = {}

    def noted(case: Case, *args: Any, **kwargs: Any) -> None:
        init(case, *args, **kwargs)
        frame = sys._getframe(1)  # the caller, without a traceback
        found = user_frames(entrance, frame)
        statement = found[0].spot.statement if found else None
        if statement is not None:
            is_direct = found[0].spot.code is frame.f_code
            calls[id(case)] = _given(found[0], statement, len(args), {*kwargs} if is_direct else {""})

    with replaced(Case, __init__=noted):
        yield calls


def _given(frame: UserFrame, statement: ast.stmt, count: int, keywords: set[str]) -> Given:
    call = frame.spot.node
    if not isinstance(call, ast.Call) or len(call.args) != count or {one.arg for one in call.keywords} != keywords:
        return Given(frame, statement)  # `Case(*parts)`, or a function that calls it
    named = {**dict(zip(_FIELDS, call.args, strict=False)), **{str(one.arg): one.value for one in call.keywords}}
    return Given(frame, statement, **{key: one for key, one in named.items() if key in _FIELDS})
