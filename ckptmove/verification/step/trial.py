"""The step, parity and fresh checks: one pass over an optimizer's pieces, a batch at a time.

Never keeps a tensor beyond its batch.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

import torch

from ckptmove.errors import UnreadableInput
from ckptmove.torch_facts.optimizers import keeps_state_on_first, state_keys, steps_together
from ckptmove.verification.loaded import NoWrapper
from ckptmove.verification.pieces import batches
from ckptmove.verification.place import TorchDevice
from ckptmove.verification.state import bits
from ckptmove.verification.step.optimizers import uses_state
from ckptmove.verification.step.parameter import judge, stored_count
from ckptmove.verification.step.recipe import CannotBuild, Refused
from ckptmove.verification.step.step import Draft, Stepped, as_one, scaled, step_without_file, stored_state, take_step

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from ckptmove.verification.pieces import Piece
    from ckptmove.verification.step.tally import Trial, TrialTally

#: What torch raises where it refuses a step, and what this package raises where there is nothing to step from.
STEP_ERRORS: Final = (
    RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, UnreadableInput,
)  # fmt: skip
#: What is said of parameters for which a step without the state shows nothing. Where this holds for all, it is a fault:
LOST: Final = "with state of zeros, although steps were made"
#: These have no state that could be lost.
READS_NOTHING: Final = "stepped by SGD without momentum, which reads no state"
IDLE: Final = "with a learning rate of 0"
UNREAD: Final = "whose options make the step read no state"
#: A class of another library shows nothing by that: it may read none whatever its options are.
IGNORED: Final = "whose state the step does not read"
#: What the moments in memory are multiplied with, to see whether a step with a group's options reads them at all.
_STIR: Final = 4.0
#: What a gradient is multiplied with, to be small against the moments.
_LESS: Final = 2.0**-6
#: Relative and absolute tolerance by dtype, those of ``torch.testing.assert_close``.
TOLERANCES: Final[dict[torch.dtype, tuple[float, float]]] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


def try_optimizer(trial: Trial, pieces: Iterator[Piece], tally: TrialTally) -> None:
    """Step every piece three times: restored, restored elsewhere, and without its state; stops at a refusal."""
    name = trial.recipe.name
    tally.trials.append(trial)
    for batch in batches(pieces, together=steps_together(name)):
        drafts: list[Draft] = []
        try:
            drafts += (scaled(piece, trial.source, name) for piece in batch)
            if keeps_state_on_first(name):
                drafts = as_one(drafts, trial.source)
            stepped = take_step(trial.recipe, drafts, trial.source, trial.place, with_state=True)
        except STEP_ERRORS as error:
            tally.limit = _limit(trial, drafts) if isinstance(error, Refused) else ""
            tally.error = "" if tally.limit else _locate(trial, batch, drafts, error)
            tally.unread = isinstance(error, UnreadableInput)
            return
        for draft, after in zip(drafts, stepped, strict=True):
            judge(trial, draft.piece, after, tally)
        others = _compare(trial, drafts, stepped, tally)
        _without_state(trial, drafts, others, tally)


def _limit(trial: Trial, drafts: Sequence[Draft]) -> str:
    """Why a refusal of another library's class shows nothing about the file; empty where it does."""
    listed = sum(len(group.params) for group in trial.optimizer.groups)
    if len(drafts) < listed:
        return f"it refuses to step {len(drafts)} of {listed} parameters, and the others have no state"
    try:
        step_without_file(trial.recipe, drafts, trial.source, TorchDevice("cpu"))
    except Refused as error:
        return f"{trial.recipe.name} makes no step from gradients and the state of its parameters: {error_text(error)}"
    return ""


def _locate(trial: Trial, batch: Sequence[Piece], drafts: Sequence[Draft], error: Exception) -> str:
    """Which parameter of a batch it is that torch refuses to step; the batch's first where each goes by itself."""
    by_itself = len(drafts) > 1 and not steps_together(trial.recipe.name)
    refusals = (_refusal(trial, draft) for draft in drafts) if by_itself else iter(())
    first = batch[0] if len(drafts) == len(batch) else batch[len(drafts)]  # the one that could not be read
    lacking = (_lacking(trial, piece, error) for piece in batch)
    return next(filter(None, chain(refusals, lacking)), f"{first.name}: {error_text(error)}")


def _refusal(trial: Trial, draft: Draft) -> str:
    try:
        take_step(trial.recipe, [draft], trial.source, trial.place, with_state=True)
    except STEP_ERRORS as error:
        return _lacking(trial, draft.piece, error) or f"{draft.piece.name}: {error_text(error)}"
    return ""


def _lacking(trial: Trial, piece: Piece, error: Exception) -> str:
    """What a parameter's state or its group lacks, where torch says no more than a key; else empty."""
    group = trial.optimizer.groups[piece.group]
    cause = error.__cause__ if isinstance(error, Refused) else error
    key = str(cause.args[0]) if isinstance(cause, KeyError) and cause.args else ""
    if not key or piece.entry is None or key in state_keys(piece.entry) or key in dict(group.options):
        return ""
    is_option = key in trial.recipe.optimizer([torch.zeros(1, 1)]).defaults
    holder = group.where if is_option else f"the state of parameter {piece.entry.key}"
    return f"{piece.name}: {error_text(error)}: {holder} has none, and {trial.recipe.name} reads it"


def error_text(error: Exception) -> str:
    """An exception on one line; of our own, its words alone."""
    if isinstance(error, (UnreadableInput, NoWrapper)):
        return str(error)
    text = str(error) if isinstance(error, (CannotBuild, Refused)) else f"{type(error).__name__}: {error}"
    return " ".join(text.split()).rstrip(":")  # an error may come without words


def _compare(trial: Trial, drafts: Sequence[Draft], stepped: Sequence[Stepped], tally: TrialTally) -> Sequence[Stepped]:
    """Make the same step elsewhere; returns what came of it, nothing where it was refused."""
    try:
        others = take_step(trial.reference, drafts, trial.second, trial.other, with_state=True)
    except STEP_ERRORS as error:
        refusal = f"the other step is refused: {error_text(error)}"
        if isinstance(error, (Refused, NoWrapper)):
            tally.unlike = refusal
        else:
            tally.apart.add(f"{drafts[0].piece.name}: {refusal}")
        return ()
    apart = []
    for draft, one, other in zip(drafts, stepped, others, strict=True):
        for key, value, reference in _pairs(one, other):
            worst = _difference(value, reference, exact=trial.exact)
            if worst is not None:
                apart.append(f"{draft.piece.name}{key}: {worst}")
            elif not trial.exact and value.numel():
                tally.furthest = max(tally.furthest, _gap(value, reference))
    if apart and trial.recipe.is_foreign and _is_random(trial, drafts, stepped):
        tally.unlike = f"{trial.recipe.name} draws random numbers, and no two of its steps are the same"
        return others
    for text in apart:
        tally.apart.add(text)
    return others


def _is_random(trial: Trial, drafts: Sequence[Draft], stepped: Sequence[Stepped]) -> bool:
    """Whether the very same step comes out otherwise with other random numbers."""
    again = take_step(trial.recipe, drafts, trial.source, trial.place, with_state=True, draw=1)
    return any(map(_differ, stepped, again))


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
    name = trial.recipe.name
    wanted = _with_state(trial, drafts[: len(others)], tally)
    if not wanted:
        return
    tally.with_state.update(tally.member(drafts[index].piece.name) for index in wanted)
    stepped = range(len(drafts)) if steps_together(name) else wanted
    begun = [drafts[index] for index in stepped]
    try:
        anew = take_step(trial.reference, begun, trial.second, trial.other, with_state=False)
        _note_changes(trial, drafts, others, dict(zip(stepped, anew, strict=True)), wanted, tally)
    except STEP_ERRORS as error:
        tally.unbegun = f"without the stored state it is refused: {error_text(error)}"


def _note_changes(
    trial: Trial,
    drafts: Sequence[Draft],
    others: Sequence[Stepped],
    fresh: dict[int, Stepped],
    wanted: Sequence[int],
    tally: TrialTally,
) -> None:
    """Note for which drafts the stored state made a difference, and why the others show none."""
    name = trial.recipe.name
    changed = {
        index for index in wanted if _differ(others[index], fresh[index], _carried(trial, drafts[index], others[index]))
    }
    if changed and keeps_state_on_first(name):
        changed.update(wanted)
    for index in wanted:
        draft = drafts[index]
        member = tally.member(draft.piece.name)
        among, at = (drafts, index) if steps_together(name) else ([draft], 0)
        if index in changed or _differs_with_less(trial, among, at):
            tally.changed.add(member)
        elif trial.has_zero_rate(draft.piece.group) and not trial.recipe.is_foreign:
            tally.bare.setdefault(IDLE, set()).add(member)
        elif not _reads_state(trial, among, at):
            tally.bare.setdefault(IGNORED if trial.recipe.is_foreign else UNREAD, set()).add(member)


def _with_state(trial: Trial, drafts: Sequence[Draft], tally: TrialTally) -> list[int]:
    """Which of some drafts have state that is to show; why the others have none is noted."""
    is_shared = keeps_state_on_first(trial.recipe.name)
    holder = next((draft for draft in drafts if draft.piece.entry is not None), None)
    wanted = []
    for index, draft in enumerate(drafts):
        reason = _bareness(trial, holder if holder is not None and is_shared else draft)
        if reason:
            tally.bare.setdefault(reason, set()).add(tally.member(draft.piece.name))
        elif tally.member(draft.piece.name) not in tally.changed:
            wanted.append(index)
    return wanted


def _differ(one: Stepped, other: Stepped, carried: Container[str] = ()) -> bool:
    """Whether two steps came out otherwise; step counts say nothing of what a step made of the moments.

    Args:
        one: the outcome of the first.
        other: that of the second.
        carried: state that is not compared, each as :func:`_pairs` names it.
    """
    return any(
        key != " (step)" and key not in carried and not torch.equal(bits(value), bits(reference))
        for key, value, reference in _pairs(one, other)
    )


def _carried(trial: Trial, draft: Draft, after: Stepped) -> frozenset[str]:
    """State that a class of another library keeps unchanged in its step: that it is there does not show it is read."""
    if not trial.recipe.is_foreign:
        return frozenset()
    stored = stored_state(draft.piece, trial.second)
    now = {key: value for key, value in after.state.items() if isinstance(value, torch.Tensor) and key in stored}
    return frozenset(f" ({key})" for key, value in now.items() if torch.equal(stored[key].to(value.dtype), value))


def _differs_with_less(trial: Trial, among: Sequence[Draft], at: int) -> bool:
    """Whether state shows beside a gradient that is small against it: Adamax takes the larger of the two."""
    small = [draft._replace(scale=draft.scale * _LESS) for draft in among]
    one, other = (
        take_step(trial.reference, small, trial.second, trial.other, with_state=with_state)[at]
        for with_state in (True, False)
    )
    return _differ(one, other, _carried(trial, among[at], one))


def _reads_state(trial: Trial, among: Sequence[Draft], at: int) -> bool:
    """Whether other moments in memory make another step: with betas of 0 they do not, however they were restored."""
    one, other = (
        take_step(trial.reference, among, trial.second, trial.other, with_state=True, planted=factor)[at]
        for factor in (1.0, _STIR)
    )
    return not torch.equal(bits(one.parameter), bits(other.parameter))


def _bareness(trial: Trial, draft: Draft) -> str:
    """Why a piece has no state whose loss would show in its step; empty where it has some."""
    piece = draft.piece
    if not uses_state(trial.recipe.name, trial.optimizer.groups[piece.group]):
        return READS_NOTHING
    if piece.entry is None or not piece.entry.tensors:
        return "without state yet"
    count = stored_count(piece, trial.source)
    if count == 0:
        return "saved before the first step"
    if trial.has_zero_rate(piece.group) and draft.largest == 0:
        return IDLE
    if draft.largest == 0:
        return LOST if count is not None else "with state of zeros"
    return "" if draft.shows else "with values of state too small to show in a step"
