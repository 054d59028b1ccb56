"""Prove that a sharded case resumes from a distributed checkpoint, on all ranks of a process group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.errors import CaseUnusable
from ckptmove.proof.checks import CASE, MESH_CHECKS, passed, skipped
from ckptmove.proof.equality import agreement
from ckptmove.proof.evidence import RankFault, RanksOfRun
from ckptmove.proof.outcome import STILL, UNUSED, Motion, not_finite, used
from ckptmove.proof.processes.messages import Message
from ckptmove.text import amount, some
from ckptmove.training import outcome
from ckptmove.training.case.step import loss_of, one_batch
from ckptmove.training.mesh.faults import rank_failure
from ckptmove.training.mesh.restore import compare, key_faults, key_fix, load, option_faults
from ckptmove.training.mesh.step import Gradients, compare_with_single, owners_of, take_step, why_not_elementwise
from ckptmove.training.mesh.stored import StoredState, local
from ckptmove.training.mesh.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ckptmove.case import Case
    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.place import StepDevice
    from ckptmove.training.mesh.group import Ranks

    Emit = Callable[[Message], None]

#: Faults of single ranks in the evidence.
_MOST_FAULTS: Final = 100


class Setting(NamedTuple):
    """What a proof is about."""

    ranks: Ranks
    checkpoint: OpenCheckpoint
    place: StepDevice  # the target
    label: str  # name of the target
    lacking: str  # why the step fails even without a fault, if a real target is required; empty otherwise
    seed: int  # seed of the gradients
    exact: bool  # whether results must equal those of a single process bit for bit
    emit: Emit  # called on the first rank with each check, and the faults of its ranks


def _backward(subject: Subject, batch: Any, device: torch.device) -> float | None:
    """The loss of a batch, after backward; None on a rank without one, as of a pipeline that is not its last stage.

    The ``step`` method of a pipeline's schedule makes the backward itself, and returns the output of the model.
    """
    case = subject.case
    if case.step is not None:
        result = case.step(batch)
        if any(subject.of(one).gradient_of(one) is not None for one in subject.parameters.values()):
            if isinstance(result, torch.Tensor) and result.numel() != 1:
                raise CaseUnusable(f"step returned a tensor of shape {tuple(result.shape)}: return the loss, or None")
            return _number(result)
        case = replace(case, step=lambda _: result)
    loss = loss_of(case, batch, device)
    loss.backward()
    return _number(loss)


def _number(loss: object) -> float | None:
    """A loss as a number; None for another object."""
    if isinstance(loss, torch.Tensor):
        return float(local(loss))
    return loss if isinstance(loss, float) else None


def _range_text(losses: Sequence[float]) -> str:
    """The losses of the ranks in words; empty without one."""
    if not losses:
        return ""
    low, high = min(losses), max(losses)
    return f"loss {low:.4g}, " if low == high else f"loss {low:.4g} to {high:.4g}, "


class Proof:
    """The checks of a mesh proof. All ranks call :meth:`run`; a check that fails on one ends it on all."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._ranks = setting.ranks
        #: Number of parameters that step otherwise without their state, and of those with state.
        self._fresh_steps = 0, 0
        #: Number of parameters that have moments only after the step.
        self._anew = 0

    def run(self, case: Case) -> None:
        """Make the checks."""
        setting, ranks = self._setting, self._ranks
        subject = Subject(case)
        found = ranks.gather((subject.keys, subject.tied))
        self._asked: frozenset[str] = frozenset().union(*(keys for keys, _ in found))
        tied = {one for _, own in found for one in own}
        with StoredState(setting.checkpoint, self._asked, sorted(tied, key=min)) as stored:
            self._check(subject, stored)

    def _check(self, subject: Subject, stored: StoredState) -> None:
        ranks = self._ranks
        shape = ranks.gather(subject.mesh)
        sizes, dims = next((one for one in shape if one is not None), ((), ()))
        self._emit(Message(run=RanksOfRun(ranks.size, sizes, dims, stored.saved_by)))
        checks = (self._keys, self._restore, self._options, self._step, self._parity, self._fresh, self._case)
        for name, check in zip(MESH_CHECKS, checks, strict=True):
            ranks.enter(name)
            if not check(subject, stored):
                for other in MESH_CHECKS[MESH_CHECKS.index(name) + 1 :]:
                    self._answer(skipped(other, f"not reached: {name} failed"))
                break

    def _keys(self, _: Subject, stored: StoredState) -> bool:
        asked = self._asked
        faults, fix = key_faults(asked, stored), key_fix(asked, stored)
        detail = f"{amount(len(asked), 'key')} of state, all in the checkpoint, and no other key there"
        detail += f"; stored under the name of a tied parameter: {some(stored.tied, 3)}" if stored.tied else ""
        detail += f"; not restored: {some(stored.aside, 3)}" if stored.aside else ""
        by_rank = [faults] + [[]] * (self._ranks.size - 1)
        return self._settle("keys", by_rank, detail, fix, named=False, keys=len(asked))

    def _restore(self, subject: Subject, stored: StoredState) -> bool:
        errors = self._ranks.gather(load(subject, stored, self._ranks.group))
        if any(errors):
            return self._settle("restore", errors, "", named=True)
        found = self._ranks.gather(compare(subject, stored))
        shards, elements = sum(one.shards for one in found), sum(one.elements for one in found)
        self._emit(Message(run=RanksOfRun(self._ranks.size, resharded=any(one.moved for one in found))))
        detail = f"{amount(shards, 'shard')} with {amount(elements, 'element')} equal the checkpoint bit for bit"
        figures = {"shards": shards, "elements": elements}
        return self._settle("restore", [one.faults for one in found], detail, named=True, **figures)

    def _options(self, subject: Subject, stored: StoredState) -> bool:
        found = self._ranks.gather(option_faults(subject, stored))
        compared = max(count for _, count in found)
        detail = f"{amount(compared, 'option')} of the groups equal the stored ones on every rank"
        return self._settle("options", [faults for faults, _ in found], detail, named=True, options=compared)

    def _step(self, subject: Subject, stored: StoredState) -> bool:
        found = self._ranks.gather(take_step(subject, stored, Gradients.for_state(stored, self._setting.seed)))
        name = subject.optimizer_name
        motion = Motion.total(one.motion for one in found)
        where = f"{name} on {amount(self._ranks.size, 'rank')} of {self._setting.label}"
        summary = motion.summary("shard", counts=", step counts went up by one")
        detail = "; ".join([f"{where}: {summary}", *motion.remarks("shard")])
        still = [STILL] * motion.is_still
        figures = {"optimizer": name, "shards": motion.stepped, "moved": motion.moved}
        faults = [one.faults + still for one in found]
        if self._setting.lacking and not any(faults):
            by_rank = [[self._setting.lacking]] + [[]] * (self._ranks.size - 1)
            return self._settle("step", by_rank, detail, named=False, **figures)
        return self._settle("step", faults, detail, named=True, **figures)

    def _parity(self, subject: Subject, stored: StoredState) -> bool:
        why_not = why_not_elementwise(subject.optimizers)
        if why_not:
            self._answer(skipped("parity", why_not))
            return True
        owners = owners_of(subject, self._ranks.gather(list(subject.parameters)))
        exact, gradients = self._setting.exact, Gradients.for_state(stored, self._setting.seed)
        parity = compare_with_single(subject, stored, owners, self._ranks, gradients, exact=exact)
        found = self._ranks.gather(parity)
        elements, count = sum(one.elements for one in found), sum(one.parameters for one in found)
        detail = f"{amount(count, 'parameter')} and their state, {amount(elements, 'element')}, "
        detail += agreement("the step of a single process", exact=exact)
        figures = {"parameters": count, "elements": elements, "exact": exact}
        self._fresh_steps = sum(one.changed for one in found), sum(one.with_state for one in found)
        self._anew = sum(one.anew for one in found)
        return self._settle("parity", [one.faults for one in found], detail, named=False, **figures)

    def _fresh(self, subject: Subject, _: StoredState) -> bool:
        changed, state = self._fresh_steps
        if not state:
            bare = why_not_elementwise(subject.optimizers) or "no stored state could change the step"
            bare = f"no state of the optimizer is stored for {amount(self._anew, 'parameter')}" if self._anew else bare
            self._answer(skipped("fresh", bare, with_state=0, anew=self._anew))
            return True
        return self._settle(
            "fresh", [[] if changed else [UNUSED]], used(changed), named=False, changed=changed, with_state=state
        )

    def _case(self, subject: Subject, _: StoredState) -> bool:
        """The user's own forward, backward and step."""
        case, device = subject.case, self._setting.place.device
        value = _backward(subject, one_batch(case.batch), device)
        named = {
            key: one
            for key, one in subject.parameters.items()
            if one.requires_grad and (one.numel() or id(one) not in subject.slices)
        }
        gradients = {key: subject.of(one).gradient_of(one) for key, one in named.items()}
        without = [f"{key} has no gradient" for key, one in gradients.items() if one is None]
        broken = [
            f"the gradient of {key} is not finite"
            for key, one in gradients.items()
            if one is not None and not bool(torch.isfinite(local(one)).all())
        ]
        subject.step()
        lost = outcome.lost({} if value is None else {"": value}, self._setting.label)
        after = [not_finite(key) for key, one in named.items() if not bool(torch.isfinite(local(one)).all())]
        found = self._ranks.gather(([*lost, *broken, *(after or without)], value))
        losses = [value for _, value in found if value is not None]
        detail = f"your step on every rank: {_range_text(losses)}{amount(len(named), 'gradient')}, all finite"
        return self._settle(CASE, [faults for faults, _ in found], detail, named=True, loss=losses)

    def _settle(
        self, check: str, faults: Sequence[list[str]], detail: str, fix: str = "", /, *, named: bool, **figures: object
    ) -> bool:
        """Answer a check by the faults of each rank, and return whether it passed.

        A fault that is named is of its rank.
        """
        if not any(faults):
            self._answer(passed(check, detail, **figures))
            return True
        self._answer(rank_failure(check, faults, self._ranks.size, fix, named=named, **figures))
        if named:
            by_rank = [RankFault(rank, check, fault) for rank, own in enumerate(faults) for fault in own]
            self._emit(Message(run=RanksOfRun(self._ranks.size, faults=(*by_rank[:_MOST_FAULTS],))))
        return False

    def _answer(self, check: CheckResult) -> None:
        self._emit(Message(check=check))

    def _emit(self, message: Message) -> None:
        if self._ranks.rank == 0:
            self._setting.emit(message)
