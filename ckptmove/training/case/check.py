"""Check a checkpoint with one step of the user's own training, from the stored state, on the target."""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckptmove.case import Case
from ckptmove.errors import CaseUnusable, CkptMoveError, UnreadableInput
from ckptmove.findings.trials import Source
from ckptmove.proof.checks import CASE, failed, passed, skipped
from ckptmove.proof.step.stored_state import Ambiguous, Mismatch, NeedsUnpickling
from ckptmove.simulation import targets
from ckptmove.simulation.device import PlainSimulatedTensor
from ckptmove.simulation.identity import foreach_by_default
from ckptmove.simulation.mps import FELL_BACK
from ckptmove.text import amount, command_line
from ckptmove.training.case.blame import Blame, blame
from ckptmove.training.case.name import parse_case
from ckptmove.training.case.options import record_options
from ckptmove.training.case.parts import by_key, models_of, optimizers_of, require_usable_case
from ckptmove.training.case.restore import own_state, restore_case
from ckptmove.training.case.restore_parts import restore_parts
from ckptmove.training.case.step import UnusableCase, WholeDataset, one_batch, train_step
from ckptmove.training.code.calls import noted_calls
from ckptmove.training.code.entrance import Entrance
from ckptmove.training.code.source import line_of
from ckptmove.training.code.tensor_names import names_of, tensors_in
from ckptmove.training.code.watch import Watch
from ckptmove.training.fixes.edits import NO_FIX, Fix
from ckptmove.training.fixes.no_step import as_batch, built_again, unmoved, unsaved
from ckptmove.training.fixes.prefixes import of_model
from ckptmove.training.fixes.scene import Scene, model_first
from ckptmove.training.mesh.launch import ranks_of
from ckptmove.training.outcome import Facts, judge, missed, not_restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType, TracebackType

    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.place import Site, StepDevice
    from ckptmove.proof.step.resume import Bench
    from ckptmove.training.case.taken import StoredPart
    from ckptmove.training.code.calls import Given
    from ckptmove.training.code.source import Line
    from ckptmove.training.code.tensor_names import NamedTensor
    from ckptmove.training.outcome import RestoredModel, SteppedOptimizer

_EXITS = "the script exits during its import"
_GUARD = (
    "move the code that parses arguments and trains under if __name__ == '__main__': the check only imports the script"
)


#: Class of a sharded parameter, which is not imported for other models.
_SHARDED = "DTensor"
#: Parts of torch's messages if a function uses the process group without torchrun.
_NO_RANK = ("env:// rendezvous", "Default process group has not been initialized")


class Attempt:
    """Context manager that keeps an exception of the user's code; exceptions of this package pass through.

    Ctrl-C does not reach this process: a ``KeyboardInterrupt`` is the user's own, too.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_theirs = error is not None and not isinstance(error, (CkptMoveError, Mismatch, NeedsUnpickling))
        self.error = error if is_theirs else None
        return is_theirs


@dataclass(slots=True)
class _Run:
    bench: Bench  # the checkpoint and the request
    place: StepDevice  # the target
    entrance: Entrance  # the user's function
    watch: Watch  # record of the user's calls of torch
    home: Line  # line of the user's function; line 0 of its file until that is imported
    given: Given | None = None  # arguments of the call of `Case`, once it ran; None if unknown
    figures: dict[str, object] = field(default_factory=dict)  # the evidence
    note_fix: Fix = NO_FIX  # fix of a note in the detail of the passed check; `NO_FIX` for none
    parts: tuple[StoredPart, ...] = ()  # stored schedulers, scalers and their kind
    not_taken: tuple[StoredPart, ...] = ()  # those that no object of the case has taken
    models: list[RestoredModel] = field(default_factory=list)  # the models of the case
    optimizers: list[SteppedOptimizer] = field(default_factory=list)  # its optimizers

    def line_in(self, frame: FrameType) -> Line:
        """The user's line that runs in a frame or its callers; the line of the function for none."""
        own = self.entrance.caller(frame)
        return self.home if own is None else line_of(own.f_code.co_filename, own.f_lineno)

    @property
    def scene(self) -> Scene:
        """Facts about an exception before the step."""
        return Scene(self.watch, self.entrance, {}, self.place, self.home, self.home, self.given)


def check_case(bench: Bench, typed: str) -> CheckResult:
    """Make the check."""
    site = bench.site
    if site.reason:
        return skipped(CASE, site.missing)
    entrance = Entrance(parse_case(typed))
    with on_target(site, bench.request.devices) as place:
        home = line_of(typed.rpartition(":")[0], 0)
        run = _Run(bench, place, entrance, Watch(place.device, entrance), home)
        run.figures |= {"case": typed, "device": site.target, "simulated": site.mode == "simulated"}
        attempt, outcomes = Attempt(), []
        try:
            # Methods of the user's modules and optimizers run outside of the step, too: state_dict, named_parameters.
            with attempt:
                outcomes.append(_attempt(run, typed))
        except NeedsUnpickling as reason:
            return skipped(CASE, f"not proven: {reason}", **run.figures, proven=False)
        except Ambiguous as doubt:
            figures = {**run.figures, "candidates": list(doubt.candidates), "fix": doubt.fix, "proven": False}
            return skipped(CASE, f"not proven: {doubt}", doubt.fix, **figures)
        fault = blame(attempt.error, run.scene) if attempt.error is not None else outcomes[0]
    if isinstance(fault, Blame):
        figures = {**run.figures, **fault.evidence, "proven": False}
        if fault.is_limit:
            return skipped(CASE, f"not proven: {fault.fault}", **figures)
        return failed(CASE, fault.failures, str(fault.fix), **figures)
    return passed(CASE, fault, str(run.note_fix), **run.figures)


@contextlib.contextmanager
def on_target(site: Site, devices: int | None) -> Iterator[StepDevice]:
    """The target, active for the user's code while the context is open."""
    place = site.place()
    with ExitStack() as stack:
        stack.enter_context(place.active())
        if site.mode == "simulated":
            stack.enter_context(foreach_by_default(PlainSimulatedTensor))
            FELL_BACK.clear()
            targets.at_least(devices or 1)
        yield place


def _attempt(run: _Run, typed: str) -> Blame | str:
    """The fault, or the detail of the passed check."""
    torch.manual_seed(run.bench.request.seed)
    attempt, made = Attempt(), []
    function = None
    with attempt, run.watch, noted_calls(run.entrance) as calls:
        function = run.entrance.load()
        code = getattr(inspect.unwrap(function), "__code__", None)  # a partial has none
        run.home = run.home if code is None else line_of(code.co_filename, code.co_firstlineno)
        made.append(called(function, run.place.device, typed))
    _require_one_rank(run.bench, attempt.error, made, typed)
    if attempt.error is not None:
        found = blame(attempt.error, run.scene)
        exits = function is None and isinstance(attempt.error, SystemExit)
        return replace(found, fault=f"{_EXITS}: {found.fault}", fix=Fix(_GUARD)) if exits else found
    case: Case = made[0]
    run.given = calls.get(id(case))
    if run.bench.site.mode != "real":
        for module in (inner for part in models_of(case) for inner in part.module.modules()):
            if isinstance(module, nn.DataParallel):
                module.device_ids = []  # scattering over one device is the module's own forward
    orphans = _orphans(run, case)
    if orphans is not None:
        return orphans
    try:
        run.models, run.optimizers = restore_case(run.bench, case, run.place)
        for part in optimizers_of(case):
            record_options(part.optimizer, run.line_in)
        run.parts, run.not_taken = restore_parts(run.bench, case, run.place)
    except UnreadableInput as error:
        return Blame(str(error))
    except Ambiguous:
        raise
    except Mismatch as error:
        figures: dict[str, object] = {"candidates": list(error.candidates)} if error.candidates else {}
        return Blame(str(error), _fix_of(error, run), figures)
    run.figures |= _restored_figures(run)
    return _step(run, case)


def called(function: Callable[..., Any], device: torch.device, typed: str) -> Case:
    """The case of the user's function. If the function takes no parameter, the models are moved to the device."""
    parameters = inspect.signature(function).parameters.values()
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    required = [one.name for one in parameters if one.default is one.empty and one.kind not in variadic]
    takes_device = any(one.kind not in {inspect.Parameter.KEYWORD_ONLY, *variadic} for one in parameters)
    if len(required) > 1:
        raise CaseUnusable(f"{typed} requires {', '.join(required)}, but is called with only the device")
    case = function(device) if takes_device else function()
    if not isinstance(case, Case):
        raise CaseUnusable(f"{typed} returns a {type(case).__name__}, not a ckptmove.Case")
    require_usable_case(case, typed)
    for part in () if takes_device else models_of(case):
        part.module.to(device)
    return case


def _require_one_rank(bench: Bench, error: BaseException | None, made: list[Case], typed: str) -> None:
    """Raise CaseUnusable for a case that is made for several ranks: torchrun did not start this process."""
    parameters = (one for case in made for part in models_of(case) for one in part.module.parameters())
    is_sharded = any(case.state is not None for case in made) or any(
        type(one.data).__name__ == _SHARDED for one in parameters
    )
    if is_sharded or (isinstance(error, ValueError) and any(text in str(error) for text in _NO_RANK)):
        raise CaseUnusable(f"the model is sharded over several ranks: run {_with_torchrun(bench, typed)}")


def _with_torchrun(bench: Bench, typed: str) -> str:
    """The command line that verifies the checkpoint with as many ranks as saved it."""
    request = bench.request
    ranks = ranks_of(row.path for part in bench.checkpoint.parts for row in part.rows) or 2
    to = [] if request.to in {None, "cpu"} else ["--to", str(request.to).partition(":")[0]]
    words = ["torchrun", "--nproc-per-node", str(ranks), "-m", "ckptmove", "verify", request.path]
    return command_line([*words, *to, "--case", typed])


def _fix_of(error: Mismatch, run: _Run) -> Fix:
    """Fix for a model or an optimizer that the stored state does not fit."""
    if error.module is None or error.fix:
        return Fix(error.fix)
    bench = run.bench
    source = Source(bench.request.path, bench.checkpoint, bench.request.limits)
    command = of_model(error.module, error.part, source)
    return command if command.text else unsaved(error, error.module, run.entrance)


def _orphans(run: _Run, case: Case) -> Blame | None:
    """The fault of an optimizer whose parameters were replaced in the model after it was built; None for none."""
    models = [(part, name, one) for part in models_of(case) for name, one in part.module.named_parameters()]
    own = {id(one) for _, _, one in models}
    if isinstance(case.criterion, nn.Module):
        own |= {id(one) for one in case.criterion.parameters()}
    optimizers = optimizers_of(case)
    held = {id(one) for part in optimizers for one in part.parameters}
    trained = [(part, name) for part, name, one in models if one.requires_grad and id(one) not in held]
    strangers = {part: [one for one in part.parameters if id(one) not in own] for part in optimizers}
    optimizer = next((part for part in optimizers if strangers[part]), None)
    if optimizer is None or not trained:
        return None
    model, name = trained[0]
    frames = run.watch.built.get(id(optimizer.optimizer), [])
    built = frames[0].spot.line if frames else None
    at = f", built at {built.quoted}," if built is not None else ""
    moved = [line for line in run.watch.moved if built is None or line.number > built.number]
    then = f"the model is moved at {moved[0].quoted}" if moved else ""
    count = amount(len(strangers[optimizer]), "parameter")
    fault = f"{optimizer.label}{at} steps {count} that the model no longer has: {model.name}.{name} is not stepped"
    figures = {"tensor": f"{model.name}.{name}", "operation": "torch.optim.Optimizer.step"}
    given = None if run.given is None else run.given.of_parts(model.key, optimizer.key)
    fix = built_again(given, frames, run.home)
    return Blame(fault, fix, figures | (built.evidence if built is not None else {}), then)


def _restored_figures(run: _Run) -> dict[str, object]:
    models, optimizers = run.models, run.optimizers
    stored = {record.name for record in run.bench.checkpoint.inventory.tensors}
    return {
        "model": by_key({one.part.key: one.where for one in models}),
        "tensors": by_key({one.part.key: one.tensors for one in models}),
        "cast": [name for one in models for name in one.cast],
        "keys_as_stored": all(
            f"{one.where}.{key}".lstrip(".") in stored
            for one in models
            for key, value in own_state(one.part.module).items()
            if isinstance(value, torch.Tensor)
        ),
        "optimizer_state": by_key({one.part.key: one.where or "" for one in optimizers}),
        "entries": by_key({one.part.key: one.entries for one in optimizers}),
        "frozen": [path for one in optimizers for path in one.frozen],
    }


def _step(run: _Run, case: Case) -> Blame | str:
    attempt, moves = Attempt(), len(run.watch.moved)
    losses: dict[str, torch.Tensor | float] = {}
    own = {one.part.key: one.steps for one in run.optimizers}
    early: dict[int, NamedTensor] = {}
    started = time.perf_counter()
    # With anomaly detection torch keeps the line that made each node, also for errors in backward.
    with attempt, torch.autograd.set_detect_anomaly(mode=True, check_nan=False), run.watch:
        case = replace(case, batch=one_batch(case.batch))
        early |= names_of(case)
        losses |= train_step(case, case.batch, run.place, own)
    run.figures["seconds"] = round(time.perf_counter() - started, 3)
    if isinstance(attempt.error, UnusableCase):
        is_dataset = isinstance(attempt.error, WholeDataset)
        figures: dict[str, object] = {"tensor": "batch", "operation": "torch.Tensor.to"} if is_dataset else {}
        fix = as_batch(run.given, run.home) if is_dataset else NO_FIX
        return Blame(f"{attempt.error}, in the case at {run.home}", fix, {**figures, **run.home.evidence})
    frames = {part.key: run.watch.built.get(id(part.optimizer)) for part in optimizers_of(case)}
    built = {key: found for key, found in frames.items() if found}
    # Reported if the traceback has no line of the user's code, as for `optimizer.step`.
    late = run.watch.moved[moves:] or [run.home, *(found[0].spot.line for found in built.values())]
    scene = run.scene._replace(late=late[-1], early=early, built=built)
    if attempt.error is not None:
        return blame(attempt.error, scene._replace(names=names_of(case)))
    return _result(run, case, losses, scene._replace(names=names_of(case)))


def _result(run: _Run, case: Case, losses: Mapping[str, torch.Tensor | float], scene: Scene) -> Blame | str:
    optimizers, away = run.optimizers, _off_target(run, scene)
    sources = optimizers if run.bench.pairings else run.models
    facts = Facts(
        who="case",
        bench=run.bench,
        place=run.place,
        models=run.models,
        optimizers=optimizers,
        parameters=[one for part in models_of(case) for one in part.module.parameters()],
        names={identity: known.name for identity, known in scene.names.items()},
        restored=f"from {' and '.join(one.where or 'the file' for one in sources)}",
        parts=run.parts,
        not_taken=run.not_taken,
        away=None if away is None else away.tensor,
        losses={way: float(run.place.to_cpu(torch.as_tensor(one))) for way, one in losses.items()},
    )
    fault, summary, figures = judge(facts)
    run.figures |= figures | {
        "not_stepped": [one.part.name for one in optimizers if not one.steps.count],
        "parameters_not_stepped": missed(facts),
        "not_restored": not_restored(run.bench, optimizers),
        "loss": by_key({way: one if math.isfinite(one) else str(one) for way, one in (facts.losses or {}).items()}),
        "optimizer": by_key({one.part.key: one.kind for one in optimizers}),
    }
    if fault is not None:
        fix = model_first(scene, away) if away is not None and "on" in fault.figures else NO_FIX
        return Blame(fault.text, fix, {**fault.figures})
    notes = _whole_dataset(run, case)
    if FELL_BACK:
        run.figures["on_cpu"] = list(FELL_BACK)
        notes.append(f"note: not on mps, ran on the CPU: {', '.join(FELL_BACK)}")
    return "; ".join([summary, *notes])


def _off_target(run: _Run, scene: Scene) -> NamedTensor | None:
    """A parameter of the first optimizer whose parameters are all off the target; None for none."""
    for stepped in run.optimizers:
        own = [known for one in stepped.part.parameters if (known := scene.names[id(one)]).kind == "model"]
        if own and all(known.tensor.device != run.place.device for known in own):
            return own[0]
    return None


def _whole_dataset(run: _Run, case: Case) -> list[str]:
    """A note on a dataset that the user's code moves as a whole: it may not fit into the target's memory."""
    batch = {id(one) for _, one in tensors_in(case.batch)}
    for transfer in run.watch.transfers:
        if transfer.rows and not any(id(one) in batch for one in run.watch.lineage(transfer.tensor)):
            line, run.note_fix = transfer.spot.line, unmoved(transfer.spot)
            run.figures |= {"tensor": "a whole dataset", "operation": "torch.Tensor.to", **line.evidence}
            run.figures |= run.note_fix.evidence
            rows = f"{len(transfer.tensor):,} rows are moved at once for a batch of {transfer.rows:,}"
            return [f"note: a whole dataset, {rows}, at {line.quoted}"]
    return []
