"""Compare a script's model and optimizer with the checkpoint before its step, and check the step."""

from __future__ import annotations

import ast
import gc
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import nn

from ckptmove.case import Case
from ckptmove.errors import UnreadableInput
from ckptmove.proof.checks import SCRIPT, failed, passed
from ckptmove.proof.equality import has_values
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.step.stored_state import (
    Ambiguous,
    Mismatch,
    NeedsUnpickling,
    left_out,
    model_state,
    optimizer_state_dict,
)
from ckptmove.proof.tensors.wrappers import WithWrappers
from ckptmove.training.case.parts import ModelPart, OptimizerPart
from ckptmove.training.case.restore import frozen_in, matching_optimizer, own_state
from ckptmove.training.case.step import OwnSteps
from ckptmove.training.case.taken import Taking, stored_parts
from ckptmove.training.code.calls import Given, variables
from ckptmove.training.code.tensor_names import names_of
from ckptmove.training.outcome import Facts, RestoredModel, SteppedOptimizer, devices, judge

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
        self._models: dict[int, RestoredModel] = {}
        self._optimizers: dict[int, SteppedOptimizer] = {}
        self._stepped: dict[int, frozenset[int]] = {}  # identities of the models that each optimizer steps
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
    def _judged(self) -> list[SteppedOptimizer]:
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

    def _compared(self, optimizer: torch.optim.Optimizer) -> SteppedOptimizer:
        part = OptimizerPart("optimizer", "", None, optimizer)
        modules = self._modules(part)
        for module in modules:
            if id(module) not in self._models:
                self._models[id(module)] = self._compared_model(module)
        self._stepped[id(optimizer)] = frozenset(map(id, modules))
        stepped = SteppedOptimizer(part, OwnSteps(part, self._place))
        if not self._bench.pairings:
            return stepped
        found, fault = _each_fitting(
            lambda one: self._compared_state(stepped._replace(part=replace(part, part=one)), modules)
        )
        best = max(found, key=lambda one: one.entries, default=stepped._replace(fault=fault))
        return best._replace(part=part)

    def _compared_state(self, stepped: SteppedOptimizer, modules: list[nn.Module]) -> SteppedOptimizer:
        bench, part = self._bench, stepped.part
        places = [where for one in modules if (where := self._models[id(one)].where) is not None]
        case = Case({str(at): one for at, one in enumerate(modules)}, part.optimizer)
        record = matching_optimizer(bench.pairings, case, part, places)
        source = WithWrappers(bench.stored, LoadedFiles(bench.checkpoint.parts, bench.stored))
        state = optimizer_state_dict(record, bench.checkpoint, source, bench.request.limits)
        keys = [key for group in state["param_groups"] for key in group["params"]]
        pairs = [(state["state"].get(key), one) for key, one in zip(keys, part.parameters, strict=True)]
        stored = [(values, one) for values, one in pairs if values]
        equal = sum(_has_state(part.optimizer.state.get(one), values, self._place) for values, one in stored)
        return stepped._replace(
            where=record.where,
            entries=equal,
            stored=len(stored),
            groups=tuple(state["param_groups"]),
            left_out=left_out(record, state),
            frozen=tuple(frozen_in(bench, record.where, part)),
        )

    def _modules(self, part: OptimizerPart) -> list[nn.Module]:
        """The models that an optimizer steps: those that were loaded, else the outermost that have its parameters."""
        own = {id(one) for one in part.parameters}
        loaded = [one for one in self._session.modules if _has_any(one, own)]
        return _outermost(loaded or [one for one in _live(nn.Module) if _has_any(one, own)])

    def _compared_model(self, module: nn.Module) -> RestoredModel:
        own = own_state(module)
        tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
        inventory, stored = self._bench.checkpoint.inventory, self._bench.stored
        found, fault = _each_fitting(lambda one: model_state(tensors, inventory, stored, one))
        now = {**tensors, **self._session.buffers.get(id(module), {})}
        compared = [self._equal(where, state, now, module) for where, state in found]
        return max(compared, key=lambda one: one.tensors, default=RestoredModel(_part(module), None, fault=fault))

    def _equal(
        self, where: str, state: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor], module: nn.Module
    ) -> RestoredModel:
        apart = [key for key, value in state.items() if not has_values(self._place.to_cpu(now[key]), value)]
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= self._session.buffers.get(id(module), {}).keys()  # as they were after the load
        differing = tuple(f"model.{key}" for key in apart if key in known)
        other = [key for key, value in state.items() if now[key].dtype != value.dtype and key not in apart]
        cast = tuple(f"model.{key}" for key in other)
        return RestoredModel(_part(module), where, len(state) - len(apart), len(state), differing, cast)

    def _verdict(self) -> CheckResult:
        optimizers, session = self._judged or [*self._optimizers.values()], self._session
        judged = frozenset[int]().union(*(self._stepped[id(one.part.optimizer)] for one in optimizers))
        models = [one for identity, one in self._models.items() if identity in judged]
        every = list({id(one): one for each in optimizers for one in each.part.parameters}.values())
        names = {id(one): f"model.{name}" for model in models for name, one in model.part.module.named_parameters()}
        is_away = all(one.device.type != self._place.device.type for one in every)
        places = {one.where for one in models}
        facts = Facts(
            who="script",
            bench=self._bench,
            place=self._place,
            models=models,
            optimizers=optimizers,
            parameters=every,
            names=names,
            restored=f"by {session.loads[-1]}",
            parts=self._taking.parts,
            not_taken=[one for one in self._taking.left if one.path not in places],
            away=every[0] if is_away else None,
            raised=next(iter(session.raised.values()), ""),
        )
        fault, summary, figures = judge(facts)
        self._figures |= figures | {
            "loaded_at": str(session.loads[-1]),
            "model": [one.where for one in models],
            "tensors": sum(one.tensors for one in models),
            "of_tensors": sum(one.stored for one in models),
            "optimizer": [one.kind for one in optimizers],
            "optimizer_state": [one.where for one in optimizers],
            "entries": sum(one.entries for one in optimizers),
            "of_entries": sum(one.stored for one in optimizers),
            "frozen": [path for one in optimizers for path in one.frozen],
            "device": devices(facts),
        }
        if fault is not None:
            return failed(SCRIPT, fault.text, **{**self._figures, "proven": False})
        return passed(SCRIPT, summary)


def _part(module: nn.Module) -> ModelPart:
    return ModelPart("model", "", None, module)


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
