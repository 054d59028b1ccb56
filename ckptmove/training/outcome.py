"""Judge a step of the user's training: what was seen of it becomes a fault, a summary and figures.

``--case`` and ``--script`` collect the facts. All sentences of their verdicts are here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.proof.outcome import Motion, not_finite
from ckptmove.text import amount, some
from ckptmove.training.case.options import differing_options
from ckptmove.training.case.taken import ROLES
from ckptmove.training.code.watch import is_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ckptmove.proof.place import StepDevice
    from ckptmove.proof.step.resume import Bench
    from ckptmove.training.case.parts import ModelPart, OptimizerPart
    from ckptmove.training.case.step import OwnSteps
    from ckptmove.training.case.taken import StoredPart

#: Names in one sentence.
_NAMED: Final = 3


class RestoredModel(NamedTuple):
    """A model before the step."""

    part: ModelPart
    where: str | None  # path of its state_dict in the checkpoint; None if none fits
    tensors: int = 0  # number of its tensors with the stored values
    stored: int = 0  # number of its tensors that are stored
    differing: tuple[str, ...] = ()  # parameters, and buffers after the load, with other values
    cast: tuple[str, ...] = ()  # tensors with the stored values in another dtype
    fault: str = ""  # why no state_dict fits, or only a copy of the model; empty if one does


class SteppedOptimizer(NamedTuple):
    """An optimizer before its step, and the record of its steps."""

    part: OptimizerPart
    steps: OwnSteps
    where: str | None = None  # path of its state_dict in the checkpoint; None if none fits
    entries: int = 0  # number of parameters with their stored state
    stored: int = 0  # number of parameters whose state is stored
    groups: tuple[Mapping[str, Any], ...] = ()  # its groups in the file
    left_out: tuple[str, ...] = ()  # options of them that only unpickling could rebuild
    frozen: tuple[str, ...] = ()  # paths of the stored parameters without state that are frozen in it
    fault: str = ""  # why no stored state fits; empty if one does

    @property
    def kind(self) -> str:
        """Name of its class."""
        return type(self.part.optimizer).__name__

    @property
    def name(self) -> str:
        """Its name in a sentence."""
        return self.part.name if self.part.key else self.kind


class Facts(NamedTuple):
    """What was seen of a step of the user's training, and of the restore before it."""

    who: str  # `case` or `script`
    bench: Bench  # the checkpoint and the target
    place: StepDevice  # the target
    models: Sequence[RestoredModel]
    optimizers: Sequence[SteppedOptimizer]
    parameters: Sequence[torch.Tensor]  # parameters of the step
    names: Mapping[int, str]  # names of tensors by identity
    restored: str  # from where the state was restored, or by which line
    parts: Sequence[StoredPart]  # what else a resume needs, besides models and optimizers
    not_taken: Sequence[StoredPart]  # what of it nothing took
    away: torch.Tensor | None = None  # a parameter, if none of a model is on the target
    losses: Mapping[str, float] | None = None  # losses by their path in the result of the step; None if not known
    raised: str = ""  # the fault of a step that raised an exception; empty for none

    def name_of(self, parameter: torch.Tensor) -> str:
        """Name of a parameter."""
        return self.names.get(id(parameter), "a parameter")


class Fault(NamedTuple):
    """The first fault of a step."""

    text: str
    #: ``tensor``: name of the tensor that it is about, if there is one; ``on``: its device, if not the target.
    figures: Mapping[str, object] = {}


class Outcome(NamedTuple):
    """What follows from the facts about a step."""

    fault: Fault | None  # the first fault; None for none
    summary: str  # the result of a step without a fault
    figures: dict[str, object]  # the evidence that a case and a script have in common


def judge(facts: Facts) -> Outcome:
    """Judge a step."""
    optimizers, parameters = facts.optimizers, facts.parameters
    options = [option for one in optimizers for option in differing_options(one.groups, one.steps.options)]
    doubts = _doubts(facts)
    unequal = [str(one) for one in options if one.is_lost]
    unequal += [
        f"{key} is in the file as an object that is not unpickled" for one in optimizers for key in one.left_out
    ]
    unproven = "; ".join([*doubts, *unequal, *_not_taken(facts)])
    moved = set[int]().union(*(one.steps.moved for one in optimizers))
    motion = Motion(len(parameters), len(moved & set(map(id, parameters))))
    steps = amount(sum(one.steps.count for one in optimizers), "step")
    kinds = " and ".join(f"{one.part.key} ({one.kind})" if one.part.key else one.kind for one in optimizers)
    losses = ", ".join(f"loss{way} {one:.4g}" for way, one in (facts.losses or {}).items())
    loss = "" if facts.losses is None else f"{losses or 'no loss returned'}, "
    sentences = [
        f"{steps} of {kinds} on {_label(facts)}: {loss}{motion.summary('parameter')}",
        _restored(facts),
        *(str(one) for one in options if not one.is_lost),
        *[f"not proven: {unproven}"] * bool(unproven),
    ]
    figures = {
        "resumed": not doubts,
        "options": [one.figures for one in options],
        "not_taken": [one.path for one in facts.not_taken],
        "parameters": motion.stepped,
        "moved": motion.moved,
        "unproven": unproven,
        "proven": not unproven,
    }
    return Outcome(next(_faults(facts), None), "; ".join(sentences), figures)


def lost(losses: Mapping[str, float], place: str) -> list[str]:
    """The faults of losses, by their path in the result of the step."""
    return [f"the loss{way} is {one} on {place}" for way, one in losses.items() if not math.isfinite(one)]


def devices(facts: Facts) -> str:
    """Where the parameters are."""
    place, target = facts.place, facts.bench.site.target
    every = (target if is_target(one.device, place.device) else place.device_of(one) for one in facts.parameters)
    return " and ".join(dict.fromkeys(every))


def _label(facts: Facts) -> str:
    """Where the parameters are, marked if it is simulated."""
    return facts.bench.site._replace(target=devices(facts)).label


def _faults(facts: Facts) -> Iterator[Fault]:
    """The faults of a step, beginning with the one that may have caused the others."""
    if facts.raised:
        yield Fault(facts.raised)
    if facts.away is not None:
        name, device = facts.name_of(facts.away), facts.place.device_of(facts.away)
        where = f"no parameter of the model is on {facts.bench.site.target} in the step"
        yield Fault(f"{where}: {name} is on {device}", {"tensor": name, "on": device})
    if any(one.stored and not one.tensors for one in facts.models):
        yield Fault(
            "no tensor of the model has its stored value before the step: the checkpoint is only read, "
            f"{facts.restored}"
        )
    yield from map(Fault, lost(facts.losses or {}, _label(facts)))
    for one in facts.parameters:
        if not bool(torch.isfinite(facts.place.to_cpu(one)).all()):
            name = facts.name_of(one)
            yield Fault(f"{not_finite(name)} on {_label(facts)}", {"tensor": name})
    for stepped in facts.optimizers:
        if stepped.steps.count and stepped.steps.is_still:
            yield Fault(f"no parameter of the model changed in the step of {stepped.name} on {_label(facts)}")


def _doubts(facts: Facts) -> list[str]:
    """Reasons why the step does not prove that the stored models and optimizers resume."""
    models, every = facts.models, facts.optimizers
    unfit = [one.fault for one in every if one.fault]
    left = [] if unfit else not_restored(facts.bench, every)
    stepped = [one for one in every if one.steps.count]
    counted = (
        ("tensor", [name for one in models for name in one.differing], "not as stored before the step"),
        ("tensor", [name for one in models for name in one.cast], "of the file cast to the dtype of the model"),
        ("parameter", missed(facts), "not stepped"),
    )
    named = (
        ("", [one.name for one in every if not one.steps.count], " made no step"),
        ("no state was restored into ", [one.name for one in every if not one.stored and not one.fault], ""),
        ("no parameter moved in the step of ", [one.name for one in stepped if not one.steps.moved], ""),
        ("no optimizer with the state of ", [where or "the file" for where in left], " made a step"),
    )
    return [
        *(one.fault for one in models if one.fault),
        *unfit,
        *["no model has the parameters of the optimizer"] * (not models),
        *(f"{amount(len(names), noun)} {what} ({some(names, _NAMED)})" for noun, names, what in counted if names),
        *(
            f"the state of {one.stored - one.entries:,} of {amount(one.stored, 'parameter')} in {one.name} "
            "is not the stored one"
            for one in every
            if one.entries < one.stored
        ),
        *(f"{before}{' and '.join(names)}{after}" for before, names, after in named if names),
    ]


def not_restored(bench: Bench, optimizers: Iterable[SteppedOptimizer]) -> list[str]:
    """Paths of the stored optimizers that no optimizer has; copies excluded."""
    found = {one.where for one in optimizers}
    return [one.where for one, _ in bench.pairings if one.where not in found and not is_kept_aside(one.where)]


def missed(facts: Facts) -> list[str]:
    """The parameters that no step of their optimizer reached."""
    return [facts.name_of(one) for stepped in facts.optimizers if stepped.steps.count for one in stepped.steps.missed]


def _not_taken(facts: Facts) -> list[str]:
    """A sentence about the parts that nothing took; none without one. All parts of a role are named by the role."""
    left = [(one.role, one.path) for one in facts.not_taken]
    if not left:
        return []
    taken_roles = {one.role for one in facts.parts if (one.role, one.path) not in left}
    by_role = (pair for role in ROLES for pair in left if pair[0] == role)
    names = [*dict.fromkeys(path or "the file" if role in taken_roles else role for role, path in by_role)]
    named = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    verb, what = ("is", "does not restore it") if len(names) == 1 else ("are", "restores none of them")
    return [f"{named} {verb} in the file; the {facts.who} {what}"]


def _restored(facts: Facts) -> str:
    """What had its stored values before the step."""
    tensors = amount(sum(one.tensors for one in facts.models), "tensor")
    if not facts.bench.pairings:
        return f"{tensors} restored {facts.restored}; there is no optimizer state, so the optimizer starts fresh"
    entries = amount(sum(one.entries for one in facts.optimizers), "parameter")
    return f"{tensors} and the state of {entries} restored {facts.restored}"
