"""Check one parameter's step: it moved, stayed finite, and its step count rose by one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ckptmove.proof.outcome import miscounted, not_finite
from ckptmove.proof.restored.numbers import comparable
from ckptmove.proof.step.counters import as_float
from ckptmove.proof.step.moments import broken_history, disagreement
from ckptmove.proof.step.step import stored_state, stored_values
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.torch_facts.optimizers import BY_NAME, is_moment, keeps_state_on_first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.proof.step.step import Stepped
    from ckptmove.proof.step.tally import Trial, TrialTally
    from ckptmove.proof.tensors.pieces import ParameterPiece, TensorSource


def check_parameter(trial: Trial, piece: ParameterPiece, after: Stepped, tally: TrialTally) -> None:
    """Check the step of one piece, and add the results to the tally."""
    name, member = piece.name, tally.member(piece.name)
    before = stored_values(piece, trial.source)
    tally.parameters.add(member)
    tally.elements += piece.elements
    if not piece.is_stored:
        tally.standins.add(member)
    if not torch.equal(before, after.parameter):
        tally.moved.add(member)
    elif _is_state_moved(trial, piece, after):
        tally.state_moved.add(member)
    elif piece.elements and trial.recipe.is_foreign:  # torch's own classes use every gradient
        tally.untouched.add(member)
    if member not in tally.moved and member not in tally.untouched and trial.has_zero_rate(piece.group):
        tally.idle.add(member)
    for fault in _state_faults(trial, piece, after):
        tally.faults.add(f"{name}: {fault}")
    if not _all_finite(after.parameter):
        if bool((before.isfinite() & ~after.parameter.isfinite()).any()):
            tally.faults.add(not_finite(name))
        else:
            tally.not_finite_before.add(member)
    for cast in after.casts if not piece.offset else ():
        tally.casts[cast] = tally.casts.get(cast, 0) + 1
    _count(trial, piece, after, tally)


def _state_faults(trial: Trial, piece: ParameterPiece, after: Stepped) -> Iterator[str]:
    is_known = trial.recipe.name in BY_NAME
    if is_known:  # report the cause before its effects
        moments = disagreement(piece, trial.source, trial.recipe.groups[piece.group])
        history = broken_history(piece, trial.source) if keeps_state_on_first(trial.recipe.name) else ""
        yield from filter(None, (moments, history))
    for key, value in after.state.items():
        if isinstance(value, torch.Tensor) and not _all_finite(value) and (is_known or _was_finite(trial, piece, key)):
            yield not_finite(key)
    for key, stored, _ in after.casts if is_known else ():
        if not dtype_of(stored).is_floating_point and not dtype_of(stored).is_complex:
            yield f"{key} is {stored}, which no optimizer of torch keeps"
    yield from after.strays
    yield from after.vanished


def _was_finite(trial: Trial, piece: ParameterPiece, key: str) -> bool:
    """Whether a state value was finite in the file; other libraries may store infinite values on purpose."""
    record = None if piece.entry is None else piece.entry.tensor(key)
    return record is not None and _all_finite(piece.of(record, trial.source))


def _is_state_moved(trial: Trial, piece: ParameterPiece, after: Stepped) -> bool:
    """Whether a moment changed. With a tiny learning rate the update of the parameter is lost in rounding."""
    before = stored_state(piece, trial.source)
    moments = ((key, value) for key, value in before.items() if is_moment(trial.recipe.name, key, value.shape))
    return any(key in after.state and not torch.equal(value, after.state[key]) for key, value in moments)


def _count(trial: Trial, piece: ParameterPiece, after: Stepped, tally: TrialTally) -> None:
    iterations = dict(piece.entry.scalars).get("n_iter") if piece.entry is not None else None
    if isinstance(iterations, int) and keeps_state_on_first(trial.recipe.name):
        now = after.state.get("n_iter", 0)
        if now <= iterations:
            tally.faults.add(f"{piece.name}: n_iter went from {iterations} to {now}")
    if piece.offset or "step" not in after.state:
        return
    stored = stored_count(piece, trial.source)
    if stored is None:
        return
    now = as_float(after.state["step"])
    fault = miscounted(f"{piece.name}: step", stored, now)
    if fault:
        if trial.recipe.name in BY_NAME:  # classes of other libraries may count something else
            tally.faults.add(fault)
        return
    tally.counted += 1
    low, high = tally.counts or (now, now)
    tally.counts = min(low, now), max(high, now)


def stored_count(piece: ParameterPiece, source: TensorSource) -> float | None:
    """The stored step count of a piece; None if the file has none."""
    if piece.entry is None:
        return None
    record = piece.entry.tensor("step")
    stored: Any = dict(piece.entry.scalars).get("step")
    if record is not None:
        stored = source.tensor(record).item() if math.prod(record.shape) == 1 else None
    return as_float(stored) if isinstance(stored, (int, float)) else None


def _all_finite(value: torch.Tensor) -> bool:
    real = comparable(value)
    return real.numel() == 0 or not real.is_floating_point() or bool(torch.stack(torch.aminmax(real)).isfinite().all())
