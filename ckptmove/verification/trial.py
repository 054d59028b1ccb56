"""The step, parity and fresh checks: one pass over an optimizer's pieces, a batch at a time.

Never keeps a tensor beyond its batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.errors import UnreadableInput
from ckptmove.verification.checks import Offenders
from ckptmove.verification.optimizers import uses_state
from ckptmove.verification.pieces import batches
from ckptmove.verification.state import bits
from ckptmove.verification.step import Draft, Stepped, scaled, stored_values, take_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ckptmove.model import OptimizerRecord
    from ckptmove.verification.pieces import Piece, TensorSource
    from ckptmove.verification.place import Place
    from ckptmove.verification.recipe import Recipe

#: What torch raises where it refuses a step, and what this package raises where there is nothing to step from.
STEP_ERRORS: Final = (
    RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, UnreadableInput,
)  # fmt: skip
#: Relative and absolute tolerance by dtype, those of ``torch.testing.assert_close``.
TOLERANCES: Final[dict[torch.dtype, tuple[float, float]]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """How one optimizer is tried.

    Attributes:
        optimizer: the optimizer.
        recipe: class and options of the step.
        reference: the same for the step that it is compared with.
        source: of parameters and state.
        second: of those of the step that it is compared with.
        place: where the step is made.
        other: where the step is made that it is compared with.
        exact: whether the two have to agree bit for bit.
    """

    optimizer: OptimizerRecord
    recipe: Recipe
    reference: Recipe
    source: TensorSource
    second: TensorSource
    place: Place
    other: Place
    exact: bool


@dataclass(slots=True)
class TrialTally:
    """What came of the steps so far, over all optimizers.

    Attributes:
        parameters: names of those that were stepped.
        elements: how many values were stepped.
        standins: parameters that the file does not hold.
        moved: parameters of which a value changed.
        stirred: parameters that did not move in any value, but whose moments did.
        idle: parameters whose group has a learning rate of 0.
        counted: step counts that went up by one.
        first_count: the first of them, after the step.
        casts: moments that ``load_state_dict`` gave another dtype, with both dtypes.
        faults: what is wrong with the step.
        error: what torch refused, with the parameter; empty where it did not.
        apart: where the two steps disagree.
        furthest: greatest difference between the two.
        bare: why parameters have no state that could show in a step, with how many there are for each reason.
        with_state: parameters with state other than zero that the step reads.
        changed: those of them for which a step without it gave another result.
    """

    parameters: set[str] = field(default_factory=set)
    elements: int = 0
    standins: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    stirred: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    counted: int = 0
    first_count: float | None = None
    casts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    faults: Offenders = field(default_factory=Offenders)
    error: str = ""
    apart: Offenders = field(default_factory=Offenders)
    furthest: float = 0.0
    bare: dict[str, set[str]] = field(default_factory=dict)
    with_state: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)


def try_optimizer(trial: Trial, pieces: Iterator[Piece], tally: TrialTally) -> None:
    """Step every piece three times: restored, restored elsewhere, and without its state; stops at a refusal."""
    for batch in batches(pieces):
        drafts: list[Draft] = []
        try:
            drafts += (scaled(piece, trial.source, trial.recipe.name) for piece in batch)
            stepped = take_step(trial.recipe, drafts, trial.source, trial.place, with_state=True)
        except STEP_ERRORS as error:
            tally.error = _locate(trial, batch, drafts, error)
            return
        for draft, after in zip(drafts, stepped, strict=True):
            _judge(trial, draft.piece, after, tally)
        others = _compare(trial, drafts, stepped, tally)
        _without_state(trial, drafts, others, tally)


def _locate(trial: Trial, batch: Sequence[Piece], drafts: Sequence[Draft], error: Exception) -> str:
    """Which parameter of a batch it is that torch refuses to step; the batch's first where each goes by itself."""
    refusals = (_refusal(trial, draft) for draft in drafts) if len(drafts) > 1 else iter(())
    first = batch[0] if len(drafts) == len(batch) else batch[len(drafts)]  # the one that could not be read
    return next(filter(None, refusals), f"{first.name}: {_text(error)}")


def _refusal(trial: Trial, draft: Draft) -> str:
    try:
        take_step(trial.recipe, [draft], trial.source, trial.place, with_state=True)
    except STEP_ERRORS as error:
        return f"{draft.piece.name}: {_text(error)}"
    return ""


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _judge(trial: Trial, piece: Piece, after: Stepped, tally: TrialTally) -> None:
    name = piece.name
    before = stored_values(piece, trial.source)
    tally.parameters.add(name)
    tally.elements += piece.elements
    if not piece.is_stored:
        tally.standins.add(name)
    if not torch.equal(before, after.parameter):
        tally.moved.add(name)
    elif trial.recipe.groups[piece.group].get("lr") == 0:
        tally.idle.add(name)
    elif _is_stirred(trial, piece, after):
        tally.stirred.add(name)
    for key, value in (("it", after.parameter), *after.state.items()):
        if isinstance(value, torch.Tensor) and not _all_finite(value):
            tally.faults.add(f"{name}: {'the step' if key == 'it' else key} is not finite after the step")
    for fault in (*after.strays, *after.vanished):
        tally.faults.add(f"{name}: {fault}")
    for cast in after.casts if not piece.offset else ():
        tally.casts[cast] = tally.casts.get(cast, 0) + 1
    _count(trial, piece, after, tally)


def _is_stirred(trial: Trial, piece: Piece, after: Stepped) -> bool:
    """Whether a moment changed: where the learning rate is tiny, the update of the parameter is lost in rounding."""
    stored = () if piece.entry is None else piece.entry.tensors
    return any(
        not torch.equal(piece.cut(trial.source.tensor(record), record), after.state[key])
        for key, record in stored
        if record.shape and key in after.state
    )


def _count(trial: Trial, piece: Piece, after: Stepped, tally: TrialTally) -> None:
    if piece.offset or "step" not in after.state:
        return
    stored = _stored_count(piece, trial.source)
    if stored is None:
        return
    now = float(after.state["step"])
    if now != stored + 1:
        tally.faults.add(f"{piece.name}: step went from {stored:g} to {now:g}")
        return
    tally.counted += 1
    tally.first_count = now if tally.first_count is None else tally.first_count


def _stored_count(piece: Piece, source: TensorSource) -> float | None:
    """The step count that the file holds for a piece with state; None where it holds none."""
    if piece.entry is None:
        return None
    record = piece.entry.tensor("step")
    stored: Any = dict(piece.entry.scalars).get("step") if record is None else source.tensor(record).item()
    return None if stored is None else float(stored)


def _all_finite(value: torch.Tensor) -> bool:
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.numel() == 0 or not real.is_floating_point() or bool(torch.stack(torch.aminmax(real)).isfinite().all())


def _compare(trial: Trial, drafts: Sequence[Draft], stepped: Sequence[Stepped], tally: TrialTally) -> Sequence[Stepped]:
    """Make the same step elsewhere; returns what came of it, nothing where it was refused."""
    try:
        others = take_step(trial.reference, drafts, trial.second, trial.other, with_state=True)
    except STEP_ERRORS as error:
        tally.apart.add(f"{drafts[0].piece.name}: the other step is refused: {_text(error)}")
        return ()
    for draft, one, other in zip(drafts, stepped, others, strict=True):
        for key, value, reference in _pairs(one, other):
            worst = _difference(value, reference, exact=trial.exact)
            if worst is not None:
                tally.apart.add(f"{draft.piece.name}{key}: {worst}")
            elif not trial.exact and value.numel():
                tally.furthest = max(tally.furthest, _gap(value, reference))
    return others


def _pairs(one: Stepped, other: Stepped) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    yield "", one.parameter, other.parameter
    for key, value in one.state.items():
        reference = other.state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(reference, torch.Tensor):
            yield f" ({key})", value, reference


def _difference(value: torch.Tensor, reference: torch.Tensor, *, exact: bool) -> str | None:
    """How two results disagree, or None where they agree."""
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return f"{value.dtype} {tuple(value.shape)} against {reference.dtype} {tuple(reference.shape)}"
    if torch.equal(bits(value), bits(reference)):
        return None
    relative, absolute = TOLERANCES.get(value.dtype, (0.0, 0.0))
    if not exact and torch.allclose(value, reference, rtol=relative, atol=absolute, equal_nan=True):
        return None
    return f"differs by up to {_gap(value, reference):.3g}"


def _gap(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.to(torch.complex128) - reference.to(torch.complex128)).abs().max())


def _without_state(trial: Trial, drafts: Sequence[Draft], others: Sequence[Stepped], tally: TrialTally) -> None:
    """Step without the stored state, beside the step of :func:`_compare`, which agrees with that on the target.

    A parameter is done with as soon as one of its pieces came out otherwise.
    """
    wanted = []
    for draft, after in zip(drafts, others, strict=False):
        reason = _bareness(trial, draft)
        if reason:
            tally.bare.setdefault(reason, set()).add(draft.piece.name)
        elif draft.piece.name not in tally.changed:
            wanted.append((draft, after))
    if not wanted:
        return
    tally.with_state.update(draft.piece.name for draft, _ in wanted)
    begun = [draft for draft, _ in wanted]
    fresh = take_step(trial.reference, begun, trial.second, trial.other, with_state=False)
    for (draft, after), other in zip(wanted, fresh, strict=True):
        # Step counts differ in any case, and say nothing of what the step made of the moments.
        if any(
            key != " (step)" and not torch.equal(bits(value), bits(reference))
            for key, value, reference in _pairs(after, other)
        ):
            tally.changed.add(draft.piece.name)


def _bareness(trial: Trial, draft: Draft) -> str:
    """Why a piece has no state whose loss would show in its step; empty where it has some."""
    piece = draft.piece
    if not uses_state(trial.recipe.name, trial.optimizer.groups[piece.group]):
        return "stepped by SGD without momentum, which reads no state"
    if piece.entry is None or not piece.entry.tensors:
        return "without state yet"
    if _stored_count(piece, trial.source) == 0:
        return "saved before the first step"
    if draft.magnitude == 0:
        return "with state of zeros, or of values too small to show in a step"
    return ""
