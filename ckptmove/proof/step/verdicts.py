"""Derive the ``step``, ``parity`` and ``fresh`` results from the tally of the trial steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ckptmove.proof.checks import failed, passed, skipped
from ckptmove.proof.equality import agreement
from ckptmove.proof.outcome import STILL, UNUSED, Motion, used
from ckptmove.proof.step.recipe import is_foreign
from ckptmove.proof.step.trial import IDLE, IGNORED, LOST, READS_NOTHING, UNREAD
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.proof.tensors.pieces import NOT_SAMPLED
from ckptmove.text import Argument, amount, some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptmove.proof.evidence import CheckResult
    from ckptmove.proof.place import Site
    from ckptmove.proof.step.tally import OptimizerTally, TrialTally

_NO_STEP = "there is no step to compare with"
#: Parameters named in one message.
_NAMED = 3


@dataclass(slots=True)
class StepReport:
    """Conditions of the steps, for the report."""

    site: Site  # target and device mode
    require_device: bool  # whether a simulated device fails the step
    seed: int  # seed of the gradients
    fix: str  # command that fixes what torch refuses on the target, or empty
    has_model: bool  # whether the file has tensors of a model
    classes: list[str] = field(default_factory=list)  # classes of the optimizers that were stepped
    notes: list[str] = field(default_factory=list)  # assumptions that do not affect the result
    assumed: list[str] = field(default_factory=list)  # values that replaced something that the file does not have
    left_out: list[str] = field(default_factory=list)  # optimizers that were not stepped, and why
    #: parameters of stepped optimizers that were not stepped, by reason.
    unstepped: dict[str, list[str]] = field(default_factory=dict)
    compared_with: str = ""  # description of the reference step
    exact: bool = True  # whether the two steps must agree bit for bit

    def leave_out(self, names: Mapping[str, Sequence[str]]) -> None:
        """Add parameters of an optimizer that were not stepped, by reason."""
        for reason, more in names.items():
            self.unstepped.setdefault(reason, []).extend(more)

    @property
    def lacks_device(self) -> bool:
        """Whether a real device is required, and this machine does not have it."""
        return self.require_device and self.site.mode == "simulated"


def conclude(tally: TrialTally, report: StepReport) -> tuple[CheckResult, CheckResult, CheckResult]:
    """The results of ``step``, ``parity`` and ``fresh``."""
    step = _step(tally, report)
    if tally.error or not tally.parameters:
        return step, skipped("parity", _NO_STEP), skipped("fresh", _NO_STEP)
    return step, _parity(tally, report), _fresh(tally)


def without_step(reason: str, report: StepReport) -> tuple[CheckResult, CheckResult, CheckResult]:
    """The results if no step can be made."""
    step = _no_device(report) if report.lacks_device else skipped("step", reason)
    return step, skipped("parity", reason), skipped("fresh", reason)


def not_proven(report: StepReport) -> tuple[CheckResult, CheckResult, CheckResult]:
    """The results if this machine neither has the target nor can simulate it: a failure, because nothing is proven."""
    return failed("step", f"not proven: {report.site.missing}"), skipped("parity", _NO_STEP), skipped("fresh", _NO_STEP)


def missing_device(site: Site) -> str:
    """Why a step on a simulated device fails, if the device is required."""
    reason = site.missing if site.reason else f"there is no {site.target} here: it was only simulated"
    return f"{Argument('require_device')}: {reason}"


def _no_device(report: StepReport, **figures: object) -> CheckResult:
    return failed("step", missing_device(report.site), **figures)


def _step(tally: TrialTally, report: StepReport) -> CheckResult:
    still = sorted(member.name for member in tally.untouched - tally.moved - tally.state_moved)
    unmoved = {"its step changes neither the parameter nor a moment": still} if still else {}
    not_stepped = report.unstepped | unmoved
    unstepped = [_in_words(reason, names) for reason, names in not_stepped.items()]
    figures: dict[str, object] = {
        "optimizer": ", ".join(dict.fromkeys(report.classes)),
        "device": report.site.target,
        "simulated": report.site.mode == "simulated",
        "seed": report.seed,
        "parameters": len(tally.parameters),
        "not_stepped": sum(map(len, not_stepped.values())),
        "elements": tally.elements,
        "moved": len(tally.moved),
        "counted": tally.counted,
        "standins": len(tally.standins),
        "proven": False,
        "unproven": "",
    }
    failures = _failures(tally, report)
    if failures:
        return failed("step", failures, report.fix if tally.error and not tally.unread else "", **figures)
    if report.lacks_device:
        return _no_device(report, **figures)
    if not tally.parameters:
        reason = "; ".join([*report.left_out, *unstepped]) or "the param_groups list no parameter"
        return skipped("step", reason, **figures)
    remarks = dict.fromkeys([*report.notes, *report.assumed])
    parts = [*_step_parts(tally, report), *unstepped, *remarks, *report.left_out]
    if _motion(tally).is_still:
        return skipped("step", "; ".join([f"not proven: {STILL}", *parts]), **figures)
    if tally.standins and report.has_model:
        lost = amount(len(tally.standins), "parameter")
        reason = f"{lost} of the optimizer not found in the model: zeros used instead"
        return skipped("step", "; ".join([reason, *parts]), **figures)
    stood_in = [_stood_in(tally)] if tally.standins else []
    limits = [str(limit) for limit in (tally.incomparable, tally.fresh_failure) if limit]
    doubts = [*unstepped, *report.assumed, *report.left_out, *stood_in, *limits, *_doubts_of_state(tally)]
    figures["proven"] = not doubts
    figures["unproven"] = doubts[0] if doubts else ""
    return passed("step", "; ".join(parts), **figures)


def _doubts_of_state(tally: TrialTally) -> list[str]:
    """Optimizers for which no step showed that the stored state is used, and why."""
    doubts = []
    for own in _each(tally):
        ignored = own.bare.get(IGNORED, set()) - own.changed
        if ignored:
            doubts.append(f"the step does not read the state of {some(sorted({one.name for one in ignored}), _NAMED)}")
        elif not own.changed and (own.is_foreign or not own.bare.keys() <= {READS_NOTHING, IDLE, UNREAD}):
            doubts.append(f"no step shows that the state of {own.where} is used: {'; '.join(_bare(own))}")
    return doubts


def _each(tally: TrialTally) -> list[OptimizerTally]:
    """Results of each optimizer that was stepped."""
    return [tally.of(index) for index in sorted({member.optimizer for member in tally.parameters})]


def _bare(own: OptimizerTally) -> list[str]:
    """Number of parameters without state that could show in a step, by reason, as text."""
    rests = ((reason, members - own.changed) for reason, members in sorted(own.bare.items()))
    return [f"{amount(len(rest), 'parameter')} {reason}" for reason, rest in rests if rest]


def _failures(tally: TrialTally, report: StepReport) -> list[str]:
    if tally.unread:
        return [f"the input of the step cannot be read: {tally.error}"]
    if tally.error:
        return [f"the step fails on {report.site.label}: {tally.error}"]
    if tally.faults:
        return tally.faults.failures(f"after the step on {report.site.label}: ")
    if _motion(tally).is_still and not any(map(is_foreign, report.classes)):
        return [f"{STILL} on {report.site.label}"]
    return []


def _motion(tally: TrialTally) -> Motion:
    below = tally.state_moved - tally.moved - tally.idle
    changed = tally.moved | tally.state_moved
    return Motion(len(tally.parameters), len(tally.moved), len(changed), len(below), len(tally.idle))


def _step_parts(tally: TrialTally, report: StepReport) -> list[str]:
    names = " and ".join(dict.fromkeys(report.classes))
    low, high = tally.counts or (0, 0)
    most = f" in some and {high:g} in others" if low < high else ""
    count = f", step counts went up by one to {low:g}{most}" if tally.counts is not None else ""
    finite = f"{len(tally.not_finite_before):,} not finite, as before" if tally.not_finite_before else "all finite"
    size = f" ({amount(tally.elements, 'value')})"
    summary = _motion(tally).summary("parameter", size=size, finite=finite, counts=count)
    parts = [f"{names} on {report.site.label}: {summary}", *_motion(tally).remarks("parameter")]
    if tally.standins and not report.has_model:
        parts.append(_stood_in(tally))
    for (key, before, after), count_of in sorted(tally.casts.items()):
        loss = ": that loses precision" if _loses_precision(before, after) else ""
        parts.append(f"load_state_dict casts {count_of:,} {key} from {before} to {after}{loss}")
    return parts


def _in_words(reason: str, names: Sequence[str]) -> str:
    if reason == NOT_SAMPLED:  # the size of the sample says more than the names that it left out
        return f"{amount(len(names), 'parameter')} not stepped: {reason}"
    return f"{amount(len(names), 'parameter')} not stepped ({some(names, _NAMED)}): {reason}"


def _stood_in(tally: TrialTally) -> str:
    return f"{amount(len(tally.standins), 'parameter')} not in the file: zeros used instead"


def _loses_precision(before: str, after: str) -> bool:
    """Whether a cast between floating dtypes rounds or reduces the range."""
    if not (dtype_of(before).is_floating_point or dtype_of(before).is_complex):
        return False  # a mask or a count
    wide, narrow = torch.finfo(dtype_of(before)), torch.finfo(dtype_of(after))
    return wide.eps < narrow.eps or wide.max > narrow.max


def _parity(tally: TrialTally, report: StepReport) -> CheckResult:
    if tally.incomparable and not tally.apart:
        return skipped("parity", f"not proven: {tally.incomparable}")
    figures: dict[str, object] = {"exact": report.exact, "apart": tally.apart.count, "furthest": tally.furthest}
    if tally.apart:
        return failed("parity", tally.apart.failures(f"not equal to {report.compared_with}: "), **figures)
    gap = "" if report.exact else f"; largest difference {tally.furthest:.3g}"
    return passed("parity", agreement(report.compared_with, exact=report.exact) + gap, **figures)


def _fresh(tally: TrialTally) -> CheckResult:
    if tally.fresh_failure:
        return skipped("fresh", f"not proven: {tally.fresh_failure}")
    figures: dict[str, object] = {"with_state": len(tally.with_state), "changed": len(tally.changed)}
    same = sorted(tally.with_state - tally.changed - frozenset().union(*tally.bare.values()))
    owns = _each(tally)
    labeled = [(f"{own.where}: " if len(owns) > 1 else "", own) for own in owns]
    lost = [f"{where}{text}" for where, own in labeled if not own.changed and LOST in own.bare for text in _bare(own)]
    if lost:
        return failed("fresh", [f"the state was lost: {lost[0]}", *lost[1:]], **figures)
    bare = [f"{where}{text}" for where, own in labeled for text in _bare(own)]
    if not tally.with_state and not bare:
        return skipped("fresh", _NO_STEP, **figures)
    if not tally.changed and not same:
        return skipped("fresh", f"a fresh start gives the same: {'; '.join(bare)}", **figures)
    if same:
        names = ", ".join(member.name for member in same[:5])
        return failed("fresh", f"{UNUSED}: it is not used for {names}", **figures)
    return passed("fresh", "; ".join([used(len(tally.changed)), *bare]), **figures)
