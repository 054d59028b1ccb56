"""Explain an exception in the user's step: the tensor, the operation, the line, and a fix.

The user's code is not run again: the frames in the traceback and the record of `Watch` are enough.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from ckptmove.proof.refusal import reason_of
from ckptmove.simulation.device import SimulatedDevice
from ckptmove.simulation.errors import CrossDeviceError, RefusedOnMps, WrongGradient, unsupported_operation
from ckptmove.text import some
from ckptmove.training.code.source import assigned, line_of, locals_of, read
from ckptmove.training.code.watch import LOADED
from ckptmove.training.fixes.edits import NO_FIX, Fix
from ckptmove.training.fixes.lines import of_message, on_mps, returned
from ckptmove.training.fixes.modules import reachable_module, where_assigned
from ckptmove.training.fixes.moves import where_used
from ckptmove.training.fixes.scene import knows_target, made_by, target_name, where_called, where_made
from ckptmove.training.fixes.tensors import of_tensor
from ckptmove.training.fixes.training import of_training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.training.code.source import Line, Running
    from ckptmove.training.code.watch import Origin
    from ckptmove.training.fixes.modules import ReachableModule
    from ckptmove.training.fixes.scene import Scene

#: Matches torch's errors for operands on two devices, in all its versions.
_TWO_DEVICES: Final = re.compile(
    r"same device|expected device|on different devices|and (?:weight|bias) type|is on (?:cpu|CPU)|on MPS device!"
)
#: Functions that run the autograd engine.
_BACKWARD: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad"})
_NAMED: Final = 3
#: Several quoted keys, as torch's ``load_state_dict`` lists them.
_KEYS: Final = re.compile(r'"[^"\n]*"(?:, "[^"\n]*")+')


@dataclass(frozen=True, slots=True)
class Blame:
    """A fault of the user's step."""

    fault: str  # one line
    fix: Fix = NO_FIX  # the correction; `NO_FIX` if none is known
    figures: dict[str, object] = field(default_factory=dict)  # evidence for the JSON report
    earlier: str = ""  # the earlier line that led to the fault, with what happened there; empty if unknown
    is_limit: bool = False  # whether the fault is a limit of the simulation, and not the user's

    @property
    def failures(self) -> list[str]:
        """The fault, then the earlier line."""
        return [self.fault, self.earlier] if self.earlier else [self.fault]

    @property
    def evidence(self) -> dict[str, object]:
        """The figures with the fix."""
        return {**self.figures, **self.fix.evidence}


def blame(error: BaseException, scene: Scene) -> Blame:
    """Explain an exception."""
    for one in _causes(error):
        if isinstance(one, WrongGradient):
            return _of_gradient(one, scene)
        if isinstance(one, RefusedOnMps):
            return _of_refused(one, scene)
        refusal = next((refusal for refusal in reversed(scene.watch.refusals) if refusal.error is one), None)
        strays = one.strays if isinstance(one, CrossDeviceError) else () if refusal is None else refusal.strays
        if strays and (isinstance(one, CrossDeviceError) or _TWO_DEVICES.search(str(one))):
            if refusal is not None and not any(_is_known(stray, scene) for stray in strays):
                strays = refusal.strays or strays  # the arguments of the function whose inside failed
            aten = one.operation if isinstance(one, CrossDeviceError) else ""
            operation = refusal.operation if refusal is not None else aten
            if isinstance(one, CrossDeviceError) and operation in _BACKWARD:
                operation = f"{aten} in {operation}" + f" ({one.node})" * bool(one.node)
            return _of_strays(one, strays, operation, aten, scene)
    frames = scene.entrance.frames(error.__traceback__)
    line = frames[-1].spot.line if frames else scene.home
    limit = unsupported_operation(error) if isinstance(scene.place, SimulatedDevice) else None
    if limit is not None:
        called = (refusal.operation for refusal in scene.watch.refusals if refusal.error is error)
        named = limit or next(called, "") or " ".join(str(error).split())
        fault = f"not supported by the simulation: {named}, at {line.quoted}"
        return Blame(fault, figures={"operation": named, **line.evidence}, is_limit=True)
    text = _text_of(error).rstrip(": ")
    operands = next((one.operands for one in scene.watch.refusals if one.error is error), ())
    innermost = frames[-1] if frames else None
    fix = of_message(str(error), operands, innermost, scene)
    fix = fix if fix.text else on_mps(text, frames, scene)
    fix = fix if fix.text else of_training(str(error), innermost, scene.watch)
    return Blame(f"{text.rstrip('.')}, at {line.quoted}", fix, {"error": text, **line.evidence})


def _causes(error: BaseException | None) -> Iterator[BaseException]:
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
    own = [running.spot.line for running in frames]
    own += [line_of(file, number) for file, number in made_by if scene.entrance.is_own(file)]
    line = own[-1] if own else first.made or first.at or scene.home
    device = scene.place.device_of(strays[0])
    home = scene.place.device_of(torch.empty(0, device=scene.place.device))
    named = " and ".join(one.name for one in culprits[:_NAMED])
    named += f" and {len(culprits) - _NAMED} more" * (len(culprits) > _NAMED)
    verb = "is" if len(culprits) == 1 else "are"
    through = f" (through {first.through})" * bool(first.through)
    fault = f"{named}{through} {verb} on {device}, but the other tensors of {operation} are on {home}, at {line.quoted}"
    made = f"made at {first.made.quoted}" if first.made is not None and first.made != line else ""
    figures: dict[str, object] = {
        "tensor": first.name,
        "tensors": [one.name for one in culprits],
        "on": device,
        "operation": operation,
        "aten": aten,
        **line.evidence,
        "made_at": str(first.made or ""),
        "error": _text_of(error),
    }
    return Blame(fault, first.fix, figures, made)


def _of_gradient(error: WrongGradient, scene: Scene) -> Blame:
    """Explain a gradient that a user's ``backward`` returned on the wrong device."""
    line = line_of(*error.home) if error.home is not None else scene.home
    made = f"gradient {error.index} of {error.function}.backward"
    wanted, device = error.devices
    line, fix = returned(line, error)
    figures: dict[str, object] = {
        "tensor": made,
        "on": device,
        "operation": f"torch.autograd.Function {error.function}",
        **line.evidence,
        "error": f"RuntimeError: {error}",
    }
    return Blame(f"{made} is on {device}, and its input is on {wanted}, at {line.quoted}", fix, figures)


def _of_refused(error: RefusedOnMps, scene: Scene) -> Blame:
    """Explain an operation that mps lacks, or operands that it does not accept."""
    frames = scene.entrance.frames(error.__traceback__)
    made = [line_of(file, number) for file, number in error.made_by if scene.entrance.is_own(file)]
    line = [scene.home, *made, *(running.spot.line for running in frames)][-1]
    called = next((refusal.operation for refusal in scene.watch.refusals if refusal.error is error), error.operation)
    operation = f"{error.operation} in {called} ({error.node})" if error.node else called
    # The last base of these classes is the class that torch raises.
    text = " ".join(f"{type(error).__bases__[-1].__name__}: {error}".split())
    is_missing = error.operation in str(error)
    within = f" ({error.operation})" * (error.operation not in operation)
    fault = f"mps does not implement {operation}{within}" if is_missing else f"{operation}: {error}".rstrip(".")
    figures: dict[str, object] = {
        "operation": operation,
        "aten": error.operation,
        **line.evidence,
        "error": text,
    }
    return Blame(f"{fault}, at {line.quoted}", on_mps(str(error), frames, scene), figures)


def _is_known(stray: torch.Tensor, scene: Scene) -> bool:
    """Whether a tensor is of the case, or the operation that made it is known."""
    return any(id(one) in scene.names or scene.watch.origin(one) is not None for one in scene.watch.lineage(stray))


class _Culprit(NamedTuple):
    name: str  # expression of the user's code for it
    fix: Fix  # the correction
    made: Line | None = None  # line that made it, if known
    through: str = ""  # operation that made the refused tensor of it, if any
    at: Line | None = None  # line of the correction, if known


def _culprit(stray: torch.Tensor, frames: list[Running], scene: Scene) -> _Culprit:
    lineage = list(scene.watch.lineage(stray))
    operations = [origin.operation for one in lineage[:-1] if (origin := scene.watch.origin(one)) is not None]
    through = operations[-1].rpartition(".")[2] if operations else ""
    known = next((found for one in lineage if (found := scene.names.get(id(one))) is not None), None)
    if known is not None and known.kind == "state" and isinstance(stray, torch.nn.Parameter):
        known = known if reachable_module(stray, frames) is None else None
    root = scene.watch.origin(lineage[-1])
    made = None if root is None else root.spot.line
    if known is not None:
        is_itself = known.tensor is stray or known.tensor is stray._base
        fix = of_tensor(known, lineage, frames, root, scene)
        at = scene.late if known.kind == "state" else None
        return _Culprit(known.name, fix, made, "" if is_itself else through, at)
    seen = reachable_module(stray, frames) or _running_module(lineage[-1], frames) or _guide(root, frames, scene)
    if seen is not None:
        return _Culprit(seen.name, where_assigned(seen, scene))
    used = where_used(lineage, frames, scene)
    # Whether a function that runs made the tensor itself, not a loader that it iterates.
    codes = [running.spot.code for running in frames]
    is_here = root is not None and root.operation != LOADED and any(root.spot.code is code for code in codes)
    own = _variable_of(root) if root is not None and len(lineage) == 1 else ""
    of = root.operation if root is not None else "your code"
    name = f"the tensor of {made_by(root)}" if root is not None and is_here else f"a tensor that {through or of} made"
    if root is not None and (is_here or knows_target(root, scene)):
        fix = where_made(root, scene)
        # A constant of the module with the target's name would tie the script to this target.
        is_tied = root.spot.code.co_name == "<module>" and target_name(scene) in fix.text
        is_better = used is not None and bool(used[1].where) and target_name(scene) not in used[1].text
        if (used is None or fix.where) and not (is_tied and is_better):
            return _Culprit(used[0] if used is not None else name if is_here else own or name, fix, made)
    if used is not None:
        return _Culprit(*used, made)
    return _Culprit(own or name, where_called(root, frames, scene), made)


def _running_module(tensor: torch.Tensor, frames: list[Running]) -> ReachableModule | None:
    """The module that has a parameter or a buffer and whose method runs, if a caller can reach it."""
    for running in frames:
        owner = locals_of(running.frame).get("self")
        own = chain(owner.parameters(), owner.buffers()) if isinstance(owner, torch.nn.Module) else ()
        if any(one is tensor for one in own):
            return reachable_module(tensor, frames)
    return None


def _guide(root: Origin | None, frames: list[Running], scene: Scene) -> ReachableModule | None:
    """The module off the target whose device a tensor was made on: ``device=self.device``."""
    if root is None:
        return None
    given = next(
        (one.value for one in getattr(root.spot.node, "keywords", ()) if one.arg == "device"), ast.Constant("")
    )
    here = (running.frame.f_locals for running in frames if running.spot.code is root.spot.code)
    named = (values.get(name) for values in here for name in read(given))
    modules = (one for one in named if isinstance(one, torch.nn.Module))
    apart = (one for module in modules for one in islice(module.parameters(), 1) if one.device != scene.place.device)
    first = next(apart, None)
    return None if first is None else reachable_module(first, frames)


def _variable_of(root: Origin) -> str:
    """The variable that the call that made a tensor is assigned to."""
    target, value = assigned(root.spot.statement)
    return target.id if isinstance(target, ast.Name) and value is root.spot.node else ""


def _text_of(error: BaseException) -> str:
    """Class and message of an exception, on one line.

    Without torch's paragraph of advice on weights_only, the further lines of a KeyError, which ``str`` quotes as one,
    and most of the keys that ``load_state_dict`` lists.
    """
    reason = reason_of(error)
    message = f"Weights only load failed: {reason}" if reason else str(error)
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and "\n" in error.args[0]:
        message = error.args[0].partition("\n")[0]
    return " ".join(f"{type(error).__name__}: {_KEYS.sub(_some_keys, message)}".split())


def _some_keys(found: re.Match[str]) -> str:
    keys = found[0].split(", ")
    return found[0] if len(keys) <= _NAMED else some(keys, most=_NAMED)
