"""What mends a tensor that is on the wrong device: the line to paste, and where.

Never settles for words where a line can be had: a fix that is pasted is a fix that was understood.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.verification.case.blame_attributes import as_buffer, as_container, is_plain
from ckptmove.verification.case.blame_calls import made_by, where_untold
from ckptmove.verification.case.tensor_names import leaves
from ckptmove.verification.case.user_code import Line, line_of, statements_at
from ckptmove.verification.case.user_code_bindings import read_in, set_in
from ckptmove.verification.case.user_code_edits import (
    Fix,
    after,
    before,
    before_statement,
    calls_of,
    moved,
    replaced,
    text_of,
    with_device,
    with_expression,
    with_move,
)
from ckptmove.verification.case.user_code_names import (
    between,
    builder_in,
    earlier,
    given_to_case,
    innermost,
    is_own,
    is_written,
    parameter_for_device,
    rebuilt,
    set_before,
    variables,
)
from ckptmove.verification.case.user_code_pastes import can_read
from ckptmove.verification.case.watch import module_on_target, on_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from ckptmove.verification.case.tensor_names import NamedTensor
    from ckptmove.verification.case.user_code import Entrance
    from ckptmove.verification.case.user_code_names import Found, Given
    from ckptmove.verification.case.watch import Origin, Watch
    from ckptmove.verification.place import Place

    Frames = Sequence[tuple[FrameType, int]]

_LOSSES: Final = "criterion"


class Scene(NamedTuple):
    """All that a fault is read from.

    Attributes:
        watch: what was seen while the code ran.
        entrance: tells the user's frames.
        names: of the tensors of the case, by identity.
        place: where it ran.
        home: the line to speak of where the user's code is not on the way to the fault.
        late: the line that moved the model last, or built the optimizer: to speak of where state is at fault.
        early: the names that there were before the step.
        built: for each optimizer, by its key in the case, the line that built it.
    """

    watch: Watch
    entrance: Entrance
    names: Mapping[int, NamedTensor]
    place: Place
    home: Line
    late: Line
    early: Mapping[int, NamedTensor] = {}  # never written to
    built: Mapping[str, Line] = {}  # never written to

    @property
    def given(self) -> Given | None:
        """What the user's file gives to the case."""
        return given_to_case(self.home, *self.built.values())


def device_at(line: Line, scene: Scene, *known: str) -> str:
    """The target, as a line can write it: what is known to be there, the function's own device, or its bare name."""
    own = parameter_for_device(line, scene.home)
    first, *rest = (*known, "")
    return next((one for one in (first, own, *rest) if one and can_read(line, one)), _bare(scene))


def _bare(scene: Scene) -> str:
    return repr(scene.place.device_of(torch.empty(0, device=scene.place.device)))


def is_hard(device: str, scene: Scene) -> bool:
    """Whether an expression for the target is its bare name: nothing else is known of it where a line stands."""
    return device == _bare(scene)


def device_in(frame: FrameType, number: int, scene: Scene, *known: str) -> str:
    """The target, as the line that a frame is at can write it."""
    device = scene.place.device
    line = line_of(frame.f_code.co_filename, number)
    return device_at(line, scene, *known, on_target(frame, device), module_on_target(frame, device))


def where_made(origin: Origin, scene: Scene) -> Fix:
    """The line that made a tensor, with the device in it."""
    device = device_at(origin.line, scene, origin.beside, origin.module)
    loaded = None if calls_of(origin.line, origin.operation) else where_untold(origin.line, device)
    fix = loaded or with_device(origin.line, origin.operation, device)
    return fix if fix.text else Fix(f"move what {made_by(origin)} gives at {origin.line}: .to({device})")


def where_called(origin: Origin | None, frames: Frames, scene: Scene) -> Fix:
    """What comes out of a call that has no variable: moved in that call, or made where the target is known.

    Args:
        origin: of the tensor that it was made from; None where torch does not tell of what made it.
        frames: of the user's, the innermost last.
        scene: all the rest.
    """
    if origin is not None and (origin.beside or parameter_for_device(origin.line, scene.home) or not frames):
        return where_made(origin, scene)
    for frame, number in reversed(frames):
        line, device = line_of(frame.f_code.co_filename, number), device_in(frame, number, scene)
        fix = where_untold(line, device) if origin is None else None
        calls = [] if origin is None else calls_of(line, origin.code.co_name)
        fix = replaced(line, *((one, moved(line, one, device)) for one in calls)) if calls else fix
        if fix is not None and fix.where:
            return fix
    return Fix(f"move it where it is made{_seen(frames)}: .to(device)") if origin is None else where_made(origin, scene)


def _seen(frames: Frames) -> str:
    """The innermost line, in words."""
    last = [line_of(frame.f_code.co_filename, number) for frame, number in frames[-1:]]
    return "".join(f", for {line}" for line in last)


def where_used(lineage: Sequence[torch.Tensor], frames: Frames, scene: Scene, *more: str) -> tuple[str, Fix] | None:
    """A tensor's variable and the line that reads it, with the move in it; None where no frame has a name for it.

    Args:
        lineage: the tensor, then what it was made from.
        frames: of the user's, the innermost last.
        scene: all the rest.
        more: expressions that are the tensor, too, in the innermost frame.
    """
    first: tuple[Found, str] | None = None
    for depth, one in enumerate(lineage):
        for frame, number in reversed(frames):
            found = list(variables(one, [(frame, number)]))
            inner = more if depth == 0 and frame is frames[-1][0] else ()
            names = [*(each.name for each in found), *inner]
            device = device_in(frame, number, scene) if names else ""
            line, code = line_of(frame.f_code.co_filename, number), frame.f_code.co_name
            fix = with_move(line, names, device, code=code, taken=depth > 0)
            if fix is not None:
                return names[0], fix
            if found and first is None:
                first = found[0], device
    return None if first is None else (first[0].name, _by_another_name(*first))


def _by_another_name(found: Found, device: str) -> Fix:
    """The last line before that reads a variable; where there is none, or the line itself writes to it, a new line."""
    line, name = found.line, found.name
    is_written = with_move(line, [name], device, written=True) is not None
    every = [] if is_written else [one for near in statements_at(line)[-1:] for one in earlier(line, near)]
    fixes = (with_move(line_of(line.path, one.lineno), [name], device) for one in every)
    fix = next(filter(None, fixes), None)
    if fix is not None:
        return fix
    text = f"{name} = {name}.to({device})"
    words = Fix(f"move {name} where it is made, for {line}: .to(device)")
    return before(line, text, name) if found.is_own else words


def of_tensor(known: NamedTensor, frames: Frames, root: Origin | None, scene: Scene) -> Fix:
    """What mends a tensor of the case."""
    if known.kind == "attribute":
        if root is not None and id(known.tensor) not in scene.early and scene.early:  # made in the step, and kept
            return where_made(root, scene)
        return _of_attribute(known, frames, root, scene)
    if known.kind == "batch":
        return _of_batch(known, frames, scene)
    if known.kind == "criterion":
        return _of_loss(known, frames, root, scene)
    if known.kind == "state" and isinstance(known.tensor, torch.nn.Parameter):
        built = scene.built.get(known.optimizer, scene.home)
        return Fix(f"make {known.name} on the device, before the optimizer is built at {built}")
    return model_first(scene, known)


def _of_attribute(known: NamedTensor, frames: Frames, root: Origin | None, scene: Scene) -> Fix:
    """What a module of the user's keeps to itself: as a buffer, in a list of torch's, or moved where it is used."""
    is_one = isinstance(known.held, torch.Tensor)
    fix = as_buffer(known, root) if is_one else None if is_plain(known) else as_container(known, root)
    if fix is not None:
        return fix
    way = f"self.{known.key}{known.name.rpartition(f'.{known.key}')[2]}"
    used = where_used([known.tensor], frames, scene, way)
    if used is not None and used[1].where:
        return used[1]
    for frame, number in reversed(frames):
        is_kept = is_plain(known) and not is_one and is_written(known.held, known.tensor)
        if frame.f_locals.get("self") is known.holder and is_kept:
            line, device = line_of(frame.f_code.co_filename, number), device_in(frame, number, scene)
            name, held = f"self.{known.key}", known.held
            every = f"{{key: one.to({device}) for key, one in {name}.items()}}"
            return before(
                line, f"{name} = {every if isinstance(held, Mapping) else rebuilt(name, held, known.tensor, device)}"
            )
    if is_plain(known) and not is_one:
        return Fix(f"move {known.name} before it is used{_seen(frames)}: .to(device)")
    what = "a buffer" if is_one else "a part of the model"
    return Fix(f"make {known.name} {what} where it is first assigned{_seen(frames)}")


def model_first(scene: Scene, known: NamedTensor) -> Fix:
    """The move of the model that a tensor belongs to, before its optimizer is built."""
    given = None if scene.given is None else scene.given.of_parts(known.model, known.optimizer)
    if given is None or given.model is None:
        name = known.model or "model"
        return Fix(f"{name} = {name}.to(device), before the optimizer is built, in the case at {scene.home}")
    device = device_at(given.line, scene)
    if not isinstance(given.model, (ast.Name, ast.Attribute)):
        return replaced(given.line, (given.model, moved(given.line, given.model, device)))
    name = text_of(given.line, given.model)
    text = f"{name} = {name}.to({device})"
    fixes = (before_statement(given.line, one, text) for one in _before_which(given, scene.built.get(known.optimizer)))
    words = Fix(f"{text}, before the optimizer is built, in the case at {given.line}")
    return next((fix for fix in fixes if fix.where), words)


def _before_which(given: Given, built: Line | None) -> Iterator[ast.stmt]:
    """The statements before which the model may be moved, the best first: before the optimizer, if it is there."""
    optimizer = set_before(given.line, given.statement, given.optimizer)
    if optimizer is not None and isinstance(given.optimizer, ast.Name):
        name = given.optimizer.id
        lines = [] if built is None else [built]
        builder = builder_in(given, optimizer, name, *lines) or innermost(optimizer, name)
        model = {one.id for one in ast.walk(given.model or optimizer) if isinstance(one, ast.Name)}
        if not any(model & set_in(one) for one in (builder, *between(given.line, builder, given.statement))):
            if not model & set_in(optimizer):
                yield optimizer
            yield builder
    yield given.statement


def _of_batch(known: NamedTensor, frames: Frames, scene: Scene) -> Fix:
    """A tensor of the batch where the step has it, or what it lies in."""
    for frame, number in frames:
        line = line_of(frame.f_code.co_filename, number)
        device = device_in(frame, number, scene, "")
        found = list(variables(known.tensor, [(frame, number)]))
        used = [one.name for one in found if one.is_own and _is_used(frame, line, one.name)]
        own = (before(line, f"{name} = {name}.to({device})", name) for name in used)
        fix: Fix | None = next((fix for fix in islice(own, 1) if fix.where), None)
        fix = fix or with_move(line, [one.name for one in found], device, code=frame.f_code.co_name)
        fix = fix or _of_container(known, frame, line, device)
        if fix is not None:
            return fix
    return Fix(f"move {known.name} in the step{_seen(frames)}: .to(device)")


def _is_used(frame: FrameType, line: Line, name: str) -> bool:
    """Whether another value of a variable comes to anything: it is read in a line, or by whoever shares it."""
    is_shared = "." in name or name in frame.f_code.co_cellvars
    return is_shared or any(name in read_in(one) for one in statements_at(line))


def _of_container(known: NamedTensor, frame: FrameType, line: Line, device: str) -> Fix | None:
    """A tuple, list or dict in a frame with the tensor moved that it holds."""
    code = frame.f_code.co_name
    for name, value in list(frame.f_locals.items()):
        is_container = isinstance(value, (Mapping, tuple, list))
        way = next((way for way, one in leaves(value, name) if one is known.tensor), None) if is_container else None
        if way is None or not is_written(value, known.tensor):
            continue
        fix = with_move(line, [way], device, code=code)
        if fix is not None:
            return fix
        whole = rebuilt(name, value, known.tensor, device)
        if not is_own(frame, name):
            return with_expression(line, name, whole, code)
        if not _is_used(frame, line, name):
            continue
        is_settable = isinstance(_holder(value, known.tensor), (Mapping, list))
        fix = before(line, f"{way} = {way}.to({device})" if is_settable else f"{name} = {whole}", name)
        if fix.where:
            return fix
    return None


def _holder(value: Any, tensor: torch.Tensor) -> Any:
    """What a tensor lies in at once, of containers in containers."""
    for one in value.values() if isinstance(value, Mapping) else value:
        if one is not tensor and any(part is tensor for _, part in leaves(one)):
            return _holder(one, tensor)
    return value


def _of_loss(known: NamedTensor, frames: Frames, root: Origin | None, scene: Scene) -> Fix:
    """A tensor of the loss: all of a module, or one where it is made."""
    is_module = known.holder is not None
    if not is_module and root is not None:
        return where_made(root, scene)
    given = scene.given
    device = device_at(scene.home if given is None else given.line, scene)
    below = "" if is_module else known.name.removeprefix(_LOSSES)
    own = (one.name for one in variables(known.holder, frames) if one.name != "self") if is_module else iter(())
    expression = next((ast.Name(name) for name in islice(own, 1)), None) or (given.criterion if given else None)
    if given is None or expression is None:
        name = known.name if below else _LOSSES
        return Fix(f"{name} = {name}.to({device}), in the case at {scene.home}")
    name = ast.unparse(expression)
    built = set_before(given.line, given.statement, expression)
    text = f"{name}{below} = {name}{below}.to({device})"
    if built is not None:
        fix = after(given.line, built, text)
        return fix if fix.where else before_statement(given.line, given.statement, text)
    if is_module and given.criterion is not None:
        return replaced(given.line, (given.criterion, moved(given.line, given.criterion, device)))
    return Fix(f"make {known.name} on the device that the function is given, for {given.line}")
