"""Compare a script's model and optimizer with the checkpoint before its step, and check the step."""

from __future__ import annotations

import ast
import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from torch import nn

from ckptmove.case import Case
from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.errors import UnreadableInput
from ckptmove.proof.checks import SCRIPT, failed, passed
from ckptmove.proof.equality import has_values
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.step.stored_state import (
    Ambiguous,
    Mismatch,
    NeedsUnpickling,
    model_state,
    optimizer_state_dict,
)
from ckptmove.proof.tensors.wrappers import WithWrappers
from ckptmove.text import amount, some
from ckptmove.training.case.options import differing_options, doubts_and_notes
from ckptmove.training.case.parts import OptimizerPart
from ckptmove.training.case.restore import cast_text, frozen_in, matching_optimizer, own_state
from ckptmove.training.case.step import OwnSteps
from ckptmove.training.case.taken import Taking, not_taken, stored_parts
from ckptmove.training.code.calls import Given, variables
from ckptmove.training.code.tensor_names import names_of
from ckptmove.training.code.watch import is_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.place import StepDevice
    from ckptmove.proof.step.resume import Bench
    from ckptmove.training.code.source import Running
    from ckptmove.training.code.tensor_names import NamedTensor
    from ckptmove.training.fixes.scene import Scene
    from ckptmove.training.script.session import Session

_Compared = TypeVar("_Compared")
#: Steps of one optimizer after which the others are no longer waited for.
_ROUNDS: Final = 10


class _Model(NamedTuple):
    """A model before the step, compared with the checkpoint."""

    module: nn.Module  # the model
    where: str | None  # path of its state_dict in the checkpoint; None if none fits
    tensors: int = 0  # number of its tensors with the stored values
    differing: tuple[str, ...] = ()  # parameters, and buffers after the load, with other values
    total: int = 0  # number of its tensors that are stored
    fault: str = ""  # why no state_dict fits; empty if one does
    cast: tuple[str, ...] = ()  # tensors with the stored values in another dtype


class _Optimizer(NamedTuple):
    """An optimizer before its step, compared with the checkpoint."""

    part: OptimizerPart  # the optimizer
    steps: OwnSteps  # record of its steps
    where: str | None  # path of its state_dict in the checkpoint; None if none fits
    entries: int = 0  # number of parameters whose state has the stored values
    stored: int = 0  # number of parameters with stored state
    fault: str = ""  # why no stored state fits; empty if one does
    modules: frozenset[int] = frozenset()  # identities of the models that it steps
    groups: tuple[Mapping[str, Any], ...] = ()  # its stored groups
    frozen: tuple[str, ...] = ()  # paths of the stored parameters without state that are frozen in it

    @property
    def kind(self) -> str:
        """Name of its class."""
        return type(self.part.optimizer).__name__


class ScriptStep:
    """The comparison before the steps of a script, and the verdict after them."""

    def __init__(
        self,
        bench: Bench,
        place: StepDevice,
        session: Session,
        figures: dict[str, object],
    ) -> None:
        self._bench = bench
        self._place = place
        self._session = session
        self._figures = figures
        self._models: dict[int, _Model] = {}
        self._optimizers: dict[int, _Optimizer] = {}
        parts = stored_parts(bench.checkpoint, bench.site.target)
        self._taking = Taking(parts, bench.stored.tensor, place)
        session.note_taken, session.note_seeded = self._taking.note, self._taking.forget
        # Of this program; by identity, which a later tensor may have too.
        self._before = {id(one): weakref.ref(one) for one in _live(torch.Tensor)}

    def begin(self, optimizer: torch.optim.Optimizer) -> CheckResult | None:
        """Before a step: compare with the checkpoint, and copy the parameters."""
        try:
            with torch.no_grad():
                if id(optimizer) not in self._optimizers:
                    self._taking.note_live(_live, self._tensors, self._session.is_idle)
                    self._optimizers[id(optimizer)] = self._compared(optimizer)
                self._optimizers[id(optimizer)].steps.begin()
        except UnreadableInput as error:
            return failed(SCRIPT, str(error), proven=False)
        return None

    def _tensors(self) -> list[weakref.ref[torch.Tensor]]:
        """The tensors of the script, each once: a simulated one holds another."""
        every = [one for one in _live(torch.Tensor) if self._before.get(id(one), lambda: None)() is not one]
        inner = {id(getattr(one, "host", None)) for one in every}
        return [weakref.ref(one) for one in every if id(one) not in inner]

    def finish(self, optimizer: torch.optim.Optimizer) -> CheckResult | None:
        """After a step: the verdict, unless another optimizer of what was loaded has not made a step."""
        with torch.no_grad():
            steps = self._optimizers[id(optimizer)].steps
            steps.end()
            return None if steps.count < _ROUNDS and self._is_early() else self._verdict()

    def _is_early(self) -> bool:
        """Whether an optimizer that was loaded, or that has parameters of a model that was, has not made a step."""
        session = self._session
        loaded = {id(one) for one in session.optimizers}
        if loaded - self._optimizers.keys() | session.raised.keys() or not self._judged:
            return True
        trained = {id(one) for module in session.modules for one in module.parameters() if one.requires_grad}
        stepped = {id(one) for each in self._optimizers.values() for one in each.part.parameters}
        return any(not trained.isdisjoint(own - stepped) for own in map(_held, _live(torch.optim.Optimizer)))

    @property
    def _judged(self) -> list[_Optimizer]:
        """The optimizers that made a step, without those that only step models of other files."""
        return [one for one in self._optimizers.values() if not self._is_of_other_file(one.part)]

    def _is_of_other_file(self, part: OptimizerPart) -> bool:
        own = {id(one) for one in part.parameters}
        has_own = any(_has_any(one, own) for one in self._session.modules)
        return not has_own and any(_has_any(one, own) for one in self._session.elsewhere)

    def conclude(self) -> CheckResult | None:
        """The verdict for a script that ended; None if no optimizer made a step, or tried to."""
        is_tried = self._session.raised or any(one.steps.count for one in self._optimizers.values())
        with torch.no_grad():
            return self._verdict() if is_tried else None

    def _compared(self, optimizer: torch.optim.Optimizer) -> _Optimizer:
        part = OptimizerPart("optimizer", "", None, optimizer)
        modules = self._modules(part)
        for module in modules:
            if id(module) not in self._models:
                self._models[id(module)] = self._compared_model(module)
        steps, identities = OwnSteps(part, self._place), frozenset(map(id, modules))
        if not self._bench.pairings:
            return _Optimizer(part, steps, None, modules=identities)
        found, fault = _each_fitting(lambda one: self._compared_state(replace(part, part=one), steps, modules))
        best = max(found, key=lambda one: one.entries, default=_Optimizer(part, steps, None, fault=fault))
        return best._replace(part=part, modules=identities)

    def _compared_state(self, part: OptimizerPart, steps: OwnSteps, modules: list[nn.Module]) -> _Optimizer:
        bench = self._bench
        places = [where for one in modules if (where := self._models[id(one)].where) is not None]
        case = Case({str(at): one for at, one in enumerate(modules)}, part.optimizer)
        record = matching_optimizer(bench.pairings, case, part, places)
        source = WithWrappers(bench.stored, LoadedFiles(bench.checkpoint.parts, bench.stored))
        state = optimizer_state_dict(record, bench.checkpoint.inventory, source)
        keys = [key for group in state["param_groups"] for key in group["params"]]
        pairs = [(state["state"].get(key), one) for key, one in zip(keys, part.parameters, strict=True)]
        stored = [(values, one) for values, one in pairs if values]
        equal = sum(_has_state(part.optimizer.state.get(one), values, self._place) for values, one in stored)
        frozen = (*frozen_in(bench, record.where, part),)
        groups = tuple(state["param_groups"])
        return _Optimizer(part, steps, record.where, equal, len(stored), groups=groups, frozen=frozen)

    def _modules(self, part: OptimizerPart) -> list[nn.Module]:
        """The models that an optimizer steps: those that were loaded, else the outermost that have its parameters."""
        own = {id(one) for one in part.parameters}
        loaded = [one for one in self._session.modules if _has_any(one, own)]
        return _outermost(loaded or [one for one in _live(nn.Module) if _has_any(one, own)])

    def _compared_model(self, module: nn.Module) -> _Model:
        own = own_state(module)
        tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
        inventory, stored = self._bench.checkpoint.inventory, self._bench.stored
        found, fault = _each_fitting(lambda one: model_state(tensors, inventory, stored, one))
        now = {**tensors, **self._session.buffers.get(id(module), {})}
        compared = [self._equal(where, state, now, module) for where, state in found]
        return max(compared, key=lambda one: one.tensors, default=_Model(module, None, fault=fault))

    def _equal(
        self, where: str, state: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor], module: nn.Module
    ) -> _Model:
        apart = [key for key, value in state.items() if not has_values(self._place.to_cpu(now[key]), value)]
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= self._session.buffers.get(id(module), {}).keys()  # as they were after the load
        differing = tuple(key for key in apart if key in known)
        cast = tuple(key for key, value in state.items() if key not in apart and now[key].dtype != value.dtype)
        return _Model(module, where, len(state) - len(apart), differing, len(state), cast=cast)

    def _verdict(self) -> CheckResult:
        optimizers = self._judged or [*self._optimizers.values()]
        judged = frozenset[int]().union(*(one.modules for one in optimizers))
        models = [one for identity, one in self._models.items() if identity in judged]
        every = list({id(one): one for each in optimizers for one in each.part.parameters}.values())
        moved = set[int]().union(*(one.steps.moved for one in optimizers))
        kinds = " and ".join(one.kind for one in optimizers)
        tensors, entries = sum(one.tensors for one in models), sum(one.entries for one in optimizers)
        differing = [one for each in optimizers for one in differing_options(each.groups, each.steps.options)]
        lost, computed = doubts_and_notes(differing)
        places = {one.where for one in models}
        left = [one for one in self._taking.left if one.path not in places]
        unrestored = not_taken("the script", left, self._taking.parts)
        unseen = self._doubts(models, optimizers)
        doubts = [*unseen, *lost, *unrestored]
        self._figures |= {
            "resumed": not unseen,
            "loaded_at": str(self._session.loads[-1]),
            "model": [one.where for one in models],
            "tensors": tensors,
            "of_tensors": sum(one.total for one in models),
            "optimizer": [one.kind for one in optimizers],
            "optimizer_state": [one.where for one in optimizers],
            "entries": entries,
            "of_entries": sum(one.stored for one in optimizers),
            "frozen": [path for one in optimizers for path in one.frozen],
            "parameters": len(every),
            "moved": len(moved),
            "options": [one.figures for one in differing],
            "not_taken": [one.path for one in left],
            "unproven": "; ".join(doubts),
            "proven": not doubts,
        }
        site, target = self._bench.site, self._place.device
        names = {site.target if is_target(one.device, target) else self._place.device_of(one): None for one in every}
        where = " and ".join(names)
        place = site._replace(target=where).label
        self._figures["device"] = where
        fault = self._fault(models, optimizers, site.label)
        if fault:
            return failed(SCRIPT, fault, **{**self._figures, "proven": False})
        restored = f"{amount(tensors, 'tensor')} and the state of {amount(entries, 'parameter')} restored"
        count = amount(len(every), "parameter")
        steps = amount(sum(one.steps.count for one in optimizers), "step")
        summary = f"{steps} of {kinds} on {place}: {len(moved):,} of {count} moved, all finite"
        unproven = [f"not proven: {'; '.join(doubts)}"] * bool(doubts)
        return passed(SCRIPT, "; ".join([summary, f"{restored} by {self._session.loads[-1]}", *computed, *unproven]))

    def _fault(self, models: list[_Model], optimizers: list[_Optimizer], place: str) -> str:
        """The first fault of the step; empty for none."""
        if self._session.raised:
            return next(iter(self._session.raised.values()))
        target = self._place.device
        every = [one for each in optimizers for one in each.part.parameters]
        names = self._names(models)
        if not any(one.device.type == target.type for one in every):
            on = self._place.device_of(every[0])
            first = names.get(id(every[0]), "the first parameter")
            return f"no parameter of the model is on {self._bench.site.target} in the step: {first} is on {on}"
        if any(one.total and not one.tensors for one in models):
            loaded = self._session.loads[-1]
            return (
                f"no tensor of the model has its stored value before the step: the checkpoint is only read, at {loaded}"
            )
        broken = next((one for one in every if not bool(torch.isfinite(self._place.to_cpu(one)).all())), None)
        if broken is not None:
            return f"after the step on {place} {names.get(id(broken), 'a parameter')} is not finite"
        for one in optimizers:
            if one.steps.is_still:
                return f"no parameter of the model changed in the step of {one.kind} on {place}"
        return ""

    def _names(self, models: list[_Model]) -> dict[int, str]:
        return {id(one): f"model.{name}" for model in models for name, one in model.module.named_parameters()}

    def _doubts(self, models: list[_Model], optimizers: list[_Optimizer]) -> list[str]:
        """Reasons why the step does not prove that everything stored resumes."""
        doubts = [one.fault for one in models if one.fault] + [one.fault for one in optimizers if one.fault]
        doubts += ["no model has the parameters of the optimizer"] * (not models)
        differing = [f"model.{name}" for one in models for name in one.differing]
        if differing:
            count = amount(len(differing), "tensor")
            doubts.append(f"{count} not as stored before the step ({some(differing, 3)})")
        cast = [f"model.{name}" for one in models for name in one.cast]
        if cast:
            doubts.append(cast_text(cast))
        for one in optimizers:
            if one.where is not None and one.entries < one.stored:
                state = f"the state of {one.stored - one.entries:,} of {amount(one.stored, 'parameter')}"
                doubts.append(f"{state} in {one.kind} is not the stored one")
            elif not one.stored and not one.fault:
                doubts.append(f"there is no stored state for {one.kind}")
            if not one.steps.moved:
                doubts.append(f"no parameter moved in the step of {one.kind}")
        names = self._names(models)
        missed = [names.get(id(missed), "a parameter") for one in optimizers for missed in one.steps.missed]
        if missed:
            doubts.append(f"{amount(len(missed), 'parameter')} not stepped ({some(missed, 3)})")
        found = {one.where for one in optimizers}
        left = [one.where for one, _ in self._bench.pairings if one.where not in found and not is_kept_aside(one.where)]
        if left and not any(one.fault for one in optimizers):
            doubts.append(f"no optimizer with the state of {', '.join(one or 'the file' for one in left)} made a step")
        return doubts


def _each_fitting(compare: Callable[[str | None], _Compared]) -> tuple[list[_Compared], str]:
    """Results of a comparison with the part of the checkpoint that fits, or with several, and why there is not one."""
    try:
        return [compare(None)], ""
    except Ambiguous as doubt:
        parts, fault = doubt.candidates, str(doubt)
    except (Mismatch, NeedsUnpickling) as error:
        return [], str(error)
    found = []
    for part in parts:
        with suppress(Mismatch, NeedsUnpickling):
            found.append(compare(part))
    return found, fault


def _has_state(now: Any, stored: Any, place: StepDevice) -> bool:
    """Whether the state of a parameter, or a value in it, has the stored values; options may be added."""
    if isinstance(stored, torch.Tensor):
        return isinstance(now, torch.Tensor) and has_values(place.to_cpu(now), stored)
    if isinstance(stored, dict):
        return isinstance(now, dict) and all(_has_state(now.get(key), one, place) for key, one in stored.items())
    if isinstance(stored, (list, tuple)):
        is_like = isinstance(now, type(stored)) and len(now) == len(stored)
        return is_like and all(map(_has_state, now, stored, repeat(place)))
    return bool(now == stored)


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    """Identities of the parameters of an optimizer; a wrapper around one may have no groups of its own."""
    return {id(one) for group in getattr(optimizer, "param_groups", ()) for one in group["params"]}


def _has_any(module: nn.Module, own: set[int]) -> bool:
    return any(id(one) in own for one in module.parameters())


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules that are not part of another one of them, without duplicates."""
    unique = list({id(one): one for one in modules}.values())
    inner = {id(part) for one in unique for part in one.modules() if part is not one}
    return [one for one in unique if id(one) not in inner]


def _live(kind: type[Any]) -> list[Any]:
    every = gc.get_objects()
    return [*compress(every, map(issubclass, map(type, every), repeat(kind)))]


def scene_of(scene: Scene, frames: list[Running]) -> Scene:
    """A scene with the names of the script's tensors that no variable of a frame leads to.

    These are tensors in optimizers, and those in plain attributes of modules.
    """
    names: dict[int, NamedTensor] = {}
    unnamed: dict[int, NamedTensor] = {}
    roots = _outermost(_live(nn.Module))
    optimizers = _live(torch.optim.Optimizer)
    for root in roots:
        own = {id(one) for one in root.parameters()}
        mine = [one for one in optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])]
        called = {"model": _name(root, frames, "model")}
        for optimizer in mine or [{}]:
            called["optimizer"] = _name(optimizer, frames, "optimizer")
            for identity, known in names_of(Case(root, optimizer)).items():
                if known.kind in {"attribute", "state"}:
                    first, dot, rest = known.name.partition(".")
                    # A parameter by its number: one of another module, whose turn comes, or of none.
                    found = unnamed if "['params']" in known.name else names
                    found.setdefault(identity, known._replace(name=f"{called[first]}{dot}{rest}"))
            built = scene.watch.built.get(id(optimizer))
            if built and scene.given is None:
                scene = scene._replace(built={"": built}, late=built[0].spot.line, given=_given(root, built))
    parameters = {id(one) for root in roots for one in root.parameters()}
    names |= {identity: known for identity, known in unnamed.items() if identity not in parameters | names.keys()}
    late = scene.watch.moved[-1:] or [scene.late]
    return scene._replace(names=names, late=late[0])


def _name(sought: object, frames: list[Running], default: str) -> str:
    return next((found.name for found in variables(sought, frames)), default)


def _given(model: nn.Module, built: list[Any]) -> Given | None:
    """The model in the statement that builds its optimizer, as an argument of ``Case``."""
    for frame in built:
        name = next((name for name, one in frame.modules.items() if one() is model), None)
        if name is not None and frame.spot.statement is not None:
            return Given(frame, frame.spot.statement, model=ast.parse(name, mode="eval").body)
    return None
