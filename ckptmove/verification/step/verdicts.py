"""From what the steps showed to the outcomes of step, parity and fresh.

Never calls a simulated device a real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ckptmove.text import amount
from ckptmove.verification.checks import failed, passed, skipped
from ckptmove.verification.state import dtype_of
from ckptmove.verification.step.recipe import is_foreign
from ckptmove.verification.step.trial import IDLE, IGNORED, LOST, READS_NOTHING, UNREAD

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ckptmove.verification.evidence import CheckResult
    from ckptmove.verification.place import Site
    from ckptmove.verification.step.tally import Member, OptimizerTally, TrialTally

_NO_STEP = "there was no step to compare with"
#: Parameters that are named in a sentence.
_NAMED = 3


@dataclass(slots=True)
class Circumstances:
    """Under what circumstances the steps were made.

    Attributes:
        site: where.
        require_device: whether a simulated device is a failure.
        seed: of the gradients.
        mend: the command that mends what torch refuses on the target, where the file holds such a thing.
        has_model: whether the file holds tensors of a model.
        classes: the optimizers that were stepped.
        notes: what was taken for granted of them that does not matter.
        assumed: what stood in for something that the file does not tell.
        left_out: optimizers that were not, and why.
        unstepped: by reason, parameters that the others list and that were not stepped.
        compared_with: what the parity check compares with.
        exact: whether the two have to agree bit for bit.
    """

    site: Site
    require_device: bool
    seed: int
    mend: str
    has_model: bool
    classes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unstepped: dict[str, list[str]] = field(default_factory=dict)
    compared_with: str = ""
    exact: bool = True

    def leave_out(self, names: Mapping[str, Sequence[str]]) -> None:
        """Note by reason which parameters of an optimizer were not stepped."""
        for reason, more in names.items():
            self.unstepped.setdefault(reason, []).extend(more)

    @property
    def lacks_device(self) -> bool:
        """Whether a real device was asked for, and there is none."""
        return self.require_device and self.site.mode == "simulated"

    @property
    def target(self) -> str:
        """The target, with the word ``simulated`` where it is."""
        return self.site.target + (" (simulated)" if self.site.mode == "simulated" else "")


def conclude(tally: TrialTally, around: Circumstances) -> tuple[CheckResult, CheckResult, CheckResult]:
    """The outcomes of step, parity and fresh."""
    step = _step(tally, around)
    if tally.error or not tally.parameters:
        return step, skipped("parity", _NO_STEP), skipped("fresh", _NO_STEP)
    return step, _parity(tally, around), _fresh(tally)


def without_step(reason: str, around: Circumstances) -> tuple[CheckResult, CheckResult, CheckResult]:
    """The outcomes where there is no step that could be made."""
    step = _no_device(around) if around.lacks_device else skipped("step", reason)
    return step, skipped("parity", reason), skipped("fresh", reason)


def not_proven(around: Circumstances) -> tuple[CheckResult, CheckResult, CheckResult]:
    """The outcomes where the target is neither here nor can be simulated: that proves nothing, so it does not pass."""
    reason = f"not proven: there is no {around.site.target} here, {_not_simulated(around)}"
    return failed("step", reason), skipped("parity", _NO_STEP), skipped("fresh", _NO_STEP)


def _no_device(around: Circumstances, **figures: object) -> CheckResult:
    instead = f", {_not_simulated(around)}" if around.site.reason else ": it was only simulated"
    reason = f"there is no {around.site.target} here, which --require-device asks for{instead}"
    return failed("step", reason, **figures)


def _not_simulated(around: Circumstances) -> str:
    return f"and it cannot be simulated: {around.site.reason}"


def _step(tally: TrialTally, around: Circumstances) -> CheckResult:
    not_stepped = _unstepped(tally, around)
    unstepped = [_in_words(reason, names) for reason, names in not_stepped.items()]
    figures: dict[str, object] = {
        "optimizer": ", ".join(dict.fromkeys(around.classes)),
        "device": around.site.target,
        "simulated": around.site.mode == "simulated",
        "seed": around.seed,
        "parameters": len(tally.parameters),
        "not_stepped": sum(map(len, not_stepped.values())),
        "elements": tally.elements,
        "moved": len(tally.moved),
        "counted": tally.counted,
        "standins": len(tally.standins),
        "proven": False,
        "unproven": "",
    }
    failure = _failure(tally, around)
    if failure:
        return failed("step", failure, **figures)
    if around.lacks_device:
        return _no_device(around, **figures)
    if not tally.parameters:
        reason = "; ".join([*around.left_out, *unstepped]) or "the param_groups list no parameter"
        return skipped("step", reason, **figures)
    parts = [*_step_parts(tally, around), *unstepped, *_remarks(around)]
    if not tally.moved and not tally.stirred and tally.idle != tally.parameters:
        reason = "not proven: one step changes neither a parameter nor a moment"
        return skipped("step", "; ".join([reason, *parts]), **figures)
    if tally.standins and around.has_model:
        lost = amount(len(tally.standins), "parameter")
        reason = f"{lost} of the optimizer not found in the model: zeros stood in"
        return skipped("step", "; ".join([reason, *parts]), **figures)
    stood_in = [_stood_in(tally)] if tally.standins else []
    limits = [limit for limit in (tally.unlike, tally.unbegun) if limit]
    doubts = [*unstepped, *around.assumed, *around.left_out, *stood_in, *limits, *_unshown(tally)]
    figures["proven"] = not doubts
    figures["unproven"] = doubts[0] if doubts else ""
    return passed("step", "; ".join(parts), **figures)


def _unshown(tally: TrialTally) -> list[str]:
    """The optimizers of which no step showed that the stored state is used, and why."""
    doubts = []
    for own in _each(tally):
        ignored = own.bare.get(IGNORED, set()) - own.changed
        if ignored:
            doubts.append(f"the step does not read the state of {_some(ignored)}")
        elif not own.changed and (own.is_foreign or not own.bare.keys() <= {READS_NOTHING, IDLE, UNREAD}):
            doubts.append(f"no step shows that the state of {own.where} is used: {'; '.join(_bare(own))}")
    return doubts


def _each(tally: TrialTally) -> list[OptimizerTally]:
    """What the steps showed of each optimizer that was stepped."""
    return [tally.of(index) for index in sorted({member.optimizer for member in tally.parameters})]


def _bare(own: OptimizerTally) -> list[str]:
    """By reason, how many parameters of an optimizer have no state that could show."""
    rests = ((reason, members - own.changed) for reason, members in own.bare.items())
    return [f"{amount(len(rest), 'parameter')} {reason}" for reason, rest in rests if rest]


def _some(members: Iterable[Member]) -> str:
    """The first few names."""
    names = sorted({member.name for member in members})
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _failure(tally: TrialTally, around: Circumstances) -> str:
    """What is wrong with the step; empty where nothing is."""
    if tally.unread:
        return f"there is nothing to step from: {tally.error}"
    if tally.error:
        mend = f"; fix: {around.mend}" if around.mend else ""
        return f"the step fails on {around.target}: {tally.error}{mend}"
    if tally.faults:
        return f"after the step on {around.target}: {tally.faults}"
    is_still = tally.parameters and not tally.moved and not tally.stirred and tally.idle != tally.parameters
    if is_still and not any(map(is_foreign, around.classes)):
        return f"neither a parameter nor a moment changed on {around.target}"
    return ""


def _step_parts(tally: TrialTally, around: Circumstances) -> list[str]:
    names = " and ".join(dict.fromkeys(around.classes))
    low, high = tally.counts or (0, 0)
    most = f" in some and {high:g} in others" if low < high else ""
    count = f", step counts went up by one to {low:g}{most}" if tally.counts is not None else ""
    finite = f"{len(tally.spoiled):,} not finite, as before" if tally.spoiled else "all finite"
    size = f"{amount(len(tally.parameters), 'parameter')} ({amount(tally.elements, 'value')})"
    parts = [f"{names} on {around.target}: {size} stepped, {len(tally.moved):,} moved, {finite}{count}"]
    still = tally.stirred - tally.moved - tally.idle
    if still:
        parts.append(f"{amount(len(still), 'parameter')} with an update below its precision")
    if tally.idle:
        parts.append(f"{amount(len(tally.idle), 'parameter')} with a learning rate of 0")
    if tally.standins and not around.has_model:
        parts.append(_stood_in(tally))
    for (key, before, after), count_of in tally.casts.items():
        loss = ": that loses precision" if _loses(before, after) else ""
        parts.append(f"load_state_dict casts {count_of:,} {key} from {before} to {after}{loss}")
    return parts


def _remarks(around: Circumstances) -> list[str]:
    return [*dict.fromkeys([*around.notes, *around.assumed]), *around.left_out]


def _unstepped(tally: TrialTally, around: Circumstances) -> dict[str, list[str]]:
    """By reason, the parameters that were not stepped: nothing is proven of them."""
    passed_over = sorted(member.name for member in tally.untouched - tally.moved - tally.stirred)
    found = {"its step changes neither the parameter nor a moment": passed_over} if passed_over else {}
    return {**around.unstepped, **found}


def _in_words(reason: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"{amount(len(names), 'parameter')} not stepped ({', '.join(names[:_NAMED])}{more}): {reason}"


def _stood_in(tally: TrialTally) -> str:
    return f"{amount(len(tally.standins), 'parameter')} not told in the file: zeros stood in"


def _loses(before: str, after: str) -> bool:
    """Whether a cast between two floating dtypes rounds, or has a smaller range."""
    if not (dtype_of(before).is_floating_point or dtype_of(before).is_complex):
        return False  # a mask, or a count
    wide, narrow = torch.finfo(dtype_of(before)), torch.finfo(dtype_of(after))
    return wide.eps < narrow.eps or wide.max > narrow.max


def _parity(tally: TrialTally, around: Circumstances) -> CheckResult:
    if tally.unlike and not tally.apart:
        return skipped("parity", f"not proven: {tally.unlike}")
    how = "bit for bit" if around.exact else "within the tolerances of torch.testing (float32: 1.3e-06, 1e-05)"
    figures: dict[str, object] = {"exact": around.exact, "apart": tally.apart.count, "furthest": tally.furthest}
    if tally.apart:
        return failed("parity", f"not equal to {around.compared_with}: {tally.apart}", **figures)
    gap = "" if around.exact else f"; furthest apart by {tally.furthest:.3g}"
    return passed("parity", f"equal {how} to {around.compared_with}{gap}", **figures)


def _fresh(tally: TrialTally) -> CheckResult:
    if tally.unbegun:
        return skipped("fresh", f"not proven: {tally.unbegun}")
    figures: dict[str, object] = {"with_state": len(tally.with_state), "changed": len(tally.changed)}
    same = sorted(tally.with_state - tally.changed - frozenset().union(*tally.bare.values()))
    owns = _each(tally)
    told = [(f"{own.where}: " if len(owns) > 1 else "", own) for own in owns]
    lost = [f"{where}{text}" for where, own in told if not own.changed and LOST in own.bare for text in _bare(own)]
    if lost:
        return failed("fresh", f"the state was lost: {'; '.join(lost)}", **figures)
    bare = [f"{where}{text}" for where, own in told for text in _bare(own)]
    if not tally.with_state and not bare:
        return skipped("fresh", _NO_STEP, **figures)
    if not tally.changed and not same:
        return skipped("fresh", f"a fresh start gives the same: {'; '.join(bare)}", **figures)
    if same:
        names = ", ".join(member.name for member in same[:5])
        return failed("fresh", f"a step without the stored state gives the same: it is not used for {names}", **figures)
    changed = f"without the stored state the step gives another result for {amount(len(tally.changed), 'parameter')}"
    return passed("fresh", "; ".join([changed, *bare]), **figures)
