"""The case check: a step of the user's own training, from the stored state, on the target.

Never lets what the user's code raises out as an error of this package.
"""

from __future__ import annotations

import functools
import inspect
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckptmove.case import Case, CaseUnusable
from ckptmove.errors import CkptMoveError, UnreadableInput
from ckptmove.verification import simulated_targets as targets
from ckptmove.verification.blame import Blame, blame, place_of
from ckptmove.verification.blame_fixes import Scene, model_first
from ckptmove.verification.case_check_fixes import as_batch, built_again, unmoved, unsaved
from ckptmove.verification.case_name import parse_case
from ckptmove.verification.case_restore import restore
from ckptmove.verification.case_step import UnusableCase, WholeDataset, one_batch, take_step
from ckptmove.verification.checks import failed, passed, skipped
from ckptmove.verification.stored_state import Mismatch
from ckptmove.verification.tensor_names import leaves, names_of
from ckptmove.verification.user_code import Entrance, line_of
from ckptmove.verification.user_code_edits import NO_FIX, Fix
from ckptmove.verification.watch import Watch
from ckptmove.wording import amount

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ckptmove.evidence import CheckResult
    from ckptmove.verification.case_restore import Restored
    from ckptmove.verification.place import Place
    from ckptmove.verification.resume import Bench
    from ckptmove.verification.tensor_names import NamedTensor
    from ckptmove.verification.user_code import Line

_NAME = "case"
_EXITS = "the script exits while it is imported"
_GUARD = "put what runs, with what reads arguments, under if __name__ == '__main__': the case is imported without them"


class Attempt:
    """Ends where the code inside it raises, and keeps what that was.

    Attributes:
        error: what was raised; None where nothing was.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_theirs = isinstance(error, (Exception, SystemExit)) and not isinstance(error, CkptMoveError)
        self.error = error if is_theirs else None
        return is_theirs


@dataclass(slots=True)
class _Run:
    """One check as it goes.

    Attributes:
        bench: what there is to resume from.
        place: where.
        entrance: the user's function.
        watch: stands around the user's code.
        figures: the evidence.
    """

    bench: Bench
    place: Place
    entrance: Entrance
    watch: Watch
    figures: dict[str, object] = field(default_factory=dict)


def check_case(bench: Bench, typed: str) -> CheckResult:
    """Make the check.

    Args:
        bench: what there is to resume from, and where.
        typed: the function's name as it was typed.

    Raises:
        CaseUnusable: it is no function that returns a case.
    """
    site = bench.site
    if site.reason:
        return skipped(_NAME, f"there is no {site.target} here, and it cannot be simulated: {site.reason}")
    entrance = Entrance(parse_case(typed))
    place = site.place()
    with place.standing():
        if site.mode == "simulated":
            _leave_autocast_out()
            targets.at_least(bench.request.devices or 1)
        run = _Run(bench, place, entrance, Watch(place, site.target, entrance))
        run.figures |= {"case": typed, "device": site.target, "simulated": site.mode == "simulated"}
        fault = _attempt(run, typed)
    if isinstance(fault, Blame):
        return failed(_NAME, str(fault), **{**run.figures, **fault.evidence, "proven": False})
    return passed(_NAME, fault, **run.figures)


@functools.cache
def _leave_autocast_out() -> torch.library.Library:
    """Let operations under autocast pass to a simulated device as they are, in the dtypes that they are given.

    Returns:
        What must live as long as the process: the rule goes when it is collected.
    """
    library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]  # torch leaves it so
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]  # torch has no annotations for it
    return library


def _attempt(run: _Run, typed: str) -> Blame | str:
    """What is wrong, or what went well."""
    torch.manual_seed(run.bench.request.seed)
    attempt, made = Attempt(), []
    function = None
    home = line_of(typed.rpartition(":")[0], 0)
    with attempt, run.watch:
        function = run.entrance.load()
        code = getattr(inspect.unwrap(function), "__code__", None)  # a partial has none
        home = home if code is None else line_of(code.co_filename, code.co_firstlineno)
        made.append(_called(function, run.place.device, typed))
    if attempt.error is not None:
        found = blame(attempt.error, Scene(run.watch, run.entrance, {}, run.place, home, home))
        exits = function is None and isinstance(attempt.error, SystemExit)
        return Blame(f"{_EXITS}: {found.fault}", Fix(_GUARD), found.figures) if exits else found
    case: Case = made[0]
    if run.bench.site.mode != "real":
        for module in case.model.modules():
            if isinstance(module, nn.DataParallel):
                module.device_ids = []  # scattering over one device is the module's own forward
    orphans = _orphans(run, case, home)
    if orphans is not None:
        return orphans
    try:
        restored = restore(run.bench, case)
    except UnreadableInput as error:
        return Blame(str(error))
    except Mismatch as error:
        return Blame(str(error), unsaved(error, case.model, run.entrance))
    run.figures |= restored.figures
    return _step(run, case, home, restored)


def _called(function: Callable[..., Any], device: torch.device, typed: str) -> Case:
    """What the user's function returns: with the device, or, where it takes nothing, with its model moved there."""
    parameters = inspect.signature(function).parameters.values()
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    required = [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]
    takes_device = any(one.kind not in {inspect.Parameter.KEYWORD_ONLY, *variadic} for one in parameters)
    if len(required) > 1:
        raise CaseUnusable(f"{typed} wants {', '.join(required)}, and is called with the device alone")
    case = function(device) if takes_device else function()
    if not isinstance(case, Case):
        raise CaseUnusable(f"{typed} returns a {type(case).__name__}, and no ckptmove.Case")
    if not isinstance(case.model, nn.Module) or not isinstance(case.optimizer, torch.optim.Optimizer):
        kinds = f"{type(case.model).__name__} and {type(case.optimizer).__name__}"
        raise CaseUnusable(f"{typed}: model and optimizer are to be a Module and an Optimizer, and are {kinds}")
    if not takes_device:
        case.model.to(device)
    return case


def _orphans(run: _Run, case: Case, home: Line) -> Blame | None:
    """Parameters that the optimizer steps in place of the model's: those that were replaced after it was built."""
    own = {id(one): name for name, one in case.model.named_parameters()}
    if isinstance(case.criterion, nn.Module):
        own |= {id(one): name for name, one in case.criterion.named_parameters()}
    held = [one for group in case.optimizer.param_groups for one in group["params"]]
    strangers = [one for one in held if id(one) not in own]
    forgotten = own.keys() - {id(one) for one in held}
    trained = [name for name, one in case.model.named_parameters() if one.requires_grad and id(one) in forgotten]
    if not strangers or not trained:
        return None
    built = run.watch.built.get(id(case.optimizer))
    at = f", built at {built}: {built.source}," if built is not None else ""
    moved = [line for line in run.watch.moved if built is None or line.number > built.number]
    then = f"; the model is moved at {moved[0]}: {moved[0].source}" if moved else ""
    fault = (
        f"the optimizer{at} steps {amount(len(strangers), 'parameter')} that the model does not have any more: "
        f"model.{trained[0]} is not among them{then}"
    )
    figures = {"tensor": f"model.{trained[0]}", "operation": "torch.optim.Optimizer.step"}
    fix = built_again(home, *([built] if built is not None else []))
    return Blame(fault, fix, figures | (place_of(built) if built is not None else {}))


def _step(run: _Run, case: Case, home: Line, restored: Restored) -> Blame | str:
    before = {id(one): run.place.to_cpu(one).clone() for one in case.model.parameters()}
    attempt, losses, moves = Attempt(), [], len(run.watch.moved)
    early: dict[int, NamedTensor] = {}
    started = time.perf_counter()
    # Which line made what a backward refuses is known to whoever asked torch to keep it.
    with attempt, torch.autograd.set_detect_anomaly(mode=True, check_nan=False), run.watch:
        case = replace(case, batch=one_batch(case.batch))
        early |= names_of(case)
        losses.append(take_step(case, case.batch, run.place.device))
    run.figures["seconds"] = round(time.perf_counter() - started, 3)
    if isinstance(attempt.error, UnusableCase):
        return _unusable(attempt.error, home)
    built = run.watch.built.get(id(case.optimizer))
    # Where none of the user's lines is on the way to the fault, as in `optimizer.step`, it is one of these.
    late = run.watch.moved[moves:] or [built or home]
    scene = Scene(run.watch, run.entrance, {}, run.place, home, late[-1], early, built)
    if attempt.error is not None:
        return blame(attempt.error, scene._replace(names=names_of(case)))
    return _judge(run, case, float(run.place.to_cpu(losses[0])), before, restored, scene)


def _unusable(error: UnusableCase, home: Line) -> Blame:
    is_dataset = isinstance(error, WholeDataset)
    figures: dict[str, object] = {"tensor": "batch", "operation": "torch.Tensor.to"} if is_dataset else {}
    fix = as_batch(home) if is_dataset else NO_FIX
    return Blame(f"{error}, in the case at {home}", fix, {**figures, **place_of(home)})


def _judge(
    run: _Run, case: Case, loss: float, before: dict[int, torch.Tensor], restored: Restored, scene: Scene
) -> Blame | str:
    after = {name: (one, run.place.to_cpu(one)) for name, one in case.model.named_parameters()}
    moved = [
        name for name, (one, value) in after.items() if id(one) in before and not torch.equal(before[id(one)], value)
    ]
    run.figures |= {
        "loss": loss if math.isfinite(loss) else str(loss),
        "optimizer": type(case.optimizer).__name__,
        "parameters": len(after),
        "moved": len(moved),
        "proven": bool(restored.entries and moved),
    }
    place = run.bench.site.target + (" (simulated)" if run.bench.site.mode == "simulated" else "")
    if not math.isfinite(loss):
        return Blame(f"the loss is {loss} on {place}")
    broken = [f"model.{name}" for name, (_, value) in after.items() if not bool(torch.isfinite(value).all())]
    if broken:
        return Blame(f"after the step on {place} {broken[0]} is not finite")
    if after and all(one.device != run.place.device for one, _ in after.values()):
        first, (one, _) = next(iter(after.items()))
        fault = f"no parameter of the model is on {run.bench.site.target} after the step: "
        return Blame(f"{fault}model.{first} is on {run.place.device_of(one)}", model_first(scene))
    rates = [float(group.get("lr", 1)) for group in case.optimizer.param_groups]
    if not moved and any(rates):
        return Blame(f"no parameter of the model changed in the step on {place}")
    count = amount(len(after), "parameter")
    said = [f"{type(case.optimizer).__name__} on {place}: loss {loss:.4g}, {len(moved):,} of {count} moved, all finite"]
    return "; ".join([*said, restored.detail, *_whole_dataset(run, case)])


def _whole_dataset(run: _Run, case: Case) -> list[str]:
    """What the user's code moves at once although it is many batches: a note, because a target may have room for it."""
    batch = {id(one) for _, one in leaves(case.batch)}
    for transfer in run.watch.transfers:
        if transfer.rows and not any(id(one) in batch for one in run.watch.lineage(transfer.tensor)):
            line, fix = transfer.line, unmoved(transfer.line)
            run.figures |= {"tensor": "a whole dataset", "operation": "torch.Tensor.to", **place_of(line)}
            run.figures |= {"fix": fix.text, "fix_at": fix.where}
            rows = f"{len(transfer.tensor):,} rows are moved at once for a batch of {transfer.rows:,}"
            return [f"note: a whole dataset, {rows}, at {line}: {line.source}", f"fix: {fix}"]
    return []
