"""Make the trial steps of an optimizer, batch by batch: restored, restored on a reference device, and fresh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ckptmove.errors import UnreadableInput
from ckptmove.proof.equality import difference, gap, same_bits
from ckptmove.proof.place import TorchDevice
from ckptmove.proof.restored.loaded import NoWrapper
from ckptmove.proof.step.optimizers import uses_state
from ckptmove.proof.step.parameter import check_parameter, stored_count
from ckptmove.proof.step.recipe import CannotBuild, ForeignError
from ckptmove.proof.step.step import Draft, Stepped, as_one, scaled, step_without_file, stored_state, take_step
from ckptmove.proof.tensors.pieces import batches
from ckptmove.simulation.device import SimulatedDevice
from ckptmove.simulation.errors import unsupported_operation
from ckptmove.torch_facts.optimizers import is_moment, keeps_state_on_first, state_keys, steps_together

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from ckptmove.model import StateEntry
    from ckptmove.proof.step.tally import Trial, TrialTally
    from ckptmove.proof.tensors.pieces import ParameterPiece

#: Exceptions of torch for a refused step, and of this package for bytes that cannot be read.
STEP_ERRORS: Final = (
    RuntimeError, AssertionError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, UnreadableInput,
)  # fmt: skip
#: Reasons why a step without the state shows nothing. A fault if it holds for all parameters of an optimizer:
LOST: Final = "with state of zeros, although steps were made"
#: No fault, because these have no state to lose:
READS_NOTHING: Final = "stepped by SGD without momentum, which reads no state"
IDLE: Final = "with a learning rate of 0"
UNREAD: Final = "whose options make the step read no state"
#: These show nothing about the stored state:
WITHOUT_STATE: Final = "without state yet"
NOT_STEPPED: Final = "saved before the first step"
ZEROS: Final = "with state of zeros"
UNJUDGED: Final = "whose state is numbers of unknown meaning"
TOO_SMALL: Final = "with values of state too small to show in a step"
#: Inconclusive for a class of another library, which may never read this state:
IGNORED: Final = "whose state the step does not read"
#: Factor for the moments in memory, to test whether a step with a group's options reads them.
_MOMENT_FACTOR: Final = 4.0
#: Factor that makes a gradient small compared with the moments.
_SMALL_GRADIENT: Final = 2.0**-6


def try_optimizer(trial: Trial, pieces: Iterator[ParameterPiece], tally: TrialTally) -> str:
    """Step every piece three times: restored, restored on the reference device, and fresh. Stop at the first error.

    Returns:
        Why a class of another library cannot be stepped here, which is not a fault of the file; empty if it can.
    """
    name = trial.recipe.name
    tally.begin(trial)
    for batch in batches(pieces, together=steps_together(name)):
        drafts: list[Draft] = []
        try:
            drafts += (scaled(piece, trial.source, name) for piece in batch)
            if keeps_state_on_first(name):
                drafts = as_one(drafts, trial.source)
            stepped = take_step(trial.recipe, drafts, trial.source, trial.place, with_state=True)
        except STEP_ERRORS as error:
            limit = _limit(trial, drafts, error) if isinstance(error, ForeignError) else ""
            if not limit:
                _add_error(trial, batch, drafts, error, tally)
            return limit
        for draft, after in zip(drafts, stepped, strict=True):
            tally.set_parameter(draft.piece)
            check_parameter(trial, draft.piece, after, tally)
        _compare(trial, drafts, stepped, tally)
    return ""


def _limit(trial: Trial, drafts: Sequence[Draft], error: ForeignError) -> str:
    """Why an error of another library's class shows nothing about the file; empty if it does."""
    limit = None if error.__cause__ is None else unsupported_operation(error.__cause__)
    if limit is not None and isinstance(trial.place, SimulatedDevice):
        return f"not supported by the simulation: {limit or error_text(error)}"
    listed = sum(len(group.params) for group in trial.optimizer.groups)
    if len(drafts) < listed:
        return f"it refuses to step {len(drafts)} of {listed} parameters, and the others have no state"
    try:
        step_without_file(trial.recipe, drafts, trial.source, TorchDevice("cpu"))
    except ForeignError as anywhere:
        error_on_cpu = error_text(anywhere)
        return f"{trial.recipe.name} makes no step from gradients and the state of its parameters: {error_on_cpu}"
    return ""


def _add_error(
    trial: Trial, batch: Sequence[ParameterPiece], drafts: Sequence[Draft], error: Exception, tally: TrialTally
) -> None:
    """Add the error of a batch, with the parameter that torch refuses to step; the first one if each steps alone."""
    piece, refusal = next(_refusals(trial, batch, drafts, error))
    text = _missing_key(trial, piece, refusal) or f"{piece.name}: {error_text(refusal)}"
    tally.set_parameter(piece)
    tally.add_error(text, is_unread=isinstance(refusal, UnreadableInput))


def _refusals(
    trial: Trial, batch: Sequence[ParameterPiece], drafts: Sequence[Draft], error: Exception
) -> Iterator[tuple[ParameterPiece, Exception]]:
    for draft in drafts if _each_alone(trial, drafts) else ():
        try:
            take_step(trial.recipe, [draft], trial.source, trial.place, with_state=True)
        except STEP_ERRORS as alone:  # noqa: PERF203  # the parameters are tried one by one
            yield draft.piece, alone
    yield from ((piece, error) for piece in batch if _missing_key(trial, piece, error))
    yield batch[0] if len(drafts) == len(batch) else batch[len(drafts)], error  # the one that could not be read


def _missing_key(trial: Trial, piece: ParameterPiece, error: Exception) -> str:
    """The key that a parameter's state or group lacks, if the error is a KeyError; else empty."""
    group = trial.optimizer.groups[piece.group]
    cause = error.__cause__ if isinstance(error, ForeignError) else error
    key = str(cause.args[0]) if isinstance(cause, KeyError) and cause.args else ""
    if not key or piece.entry is None or key in state_keys(piece.entry) or key in dict(group.options):
        return ""
    is_option = key in trial.recipe.optimizer([torch.zeros(1, 1)]).defaults
    holder = group.where if is_option else f"the state of parameter {piece.entry.key}"
    return f"{piece.name}: {error_text(error)}: {holder} does not have it, and {trial.recipe.name} reads it"


def error_text(error: Exception) -> str:
    """An exception as one line; without the type for exceptions of this package."""
    if isinstance(error, (UnreadableInput, NoWrapper)) or type(error) is LookupError:  # torch raises its subclasses
        return str(error)
    text = str(error) if isinstance(error, (CannotBuild, ForeignError)) else f"{type(error).__name__}: {error}"
    return " ".join(text.split()).rstrip(":")  # the message may be empty


def _compare(trial: Trial, drafts: Sequence[Draft], stepped: Sequence[Stepped], tally: TrialTally) -> None:
    """Make the reference step, compare the results, and step without the stored state."""
    try:
        others = take_step(trial.reference, drafts, trial.second, trial.other, with_state=True)
    except STEP_ERRORS as error:
        if _each_alone(trial, drafts):
            for draft, one in zip(drafts, stepped, strict=True):
                _compare(trial, [draft], [one], tally)
            return
        tally.set_parameter(drafts[0].piece)
        refusal = f"the reference step fails: {error_text(error)}"
        if isinstance(error, (ForeignError, NoWrapper)):
            tally.incomparable.add(refusal)
        else:
            tally.apart.add(f"{drafts[0].piece.name}: {refusal}")
        return
    apart = [*_differences(trial, drafts, stepped, others, tally)]
    if apart and trial.recipe.is_foreign and _is_random(trial, drafts, stepped):
        tally.incomparable.add(f"{trial.recipe.name} draws random numbers, so its steps differ")
        apart = []
    for piece, text in apart:
        tally.set_parameter(piece)
        tally.apart.add(text)
    _without_state(trial, drafts, others, tally)


def _differences(
    trial: Trial, drafts: Sequence[Draft], stepped: Sequence[Stepped], others: Sequence[Stepped], tally: TrialTally
) -> Iterator[tuple[ParameterPiece, str]]:
    """Differences between steps and reference steps, as text."""
    for draft, one, other in zip(drafts, stepped, others, strict=True):
        for key, value, reference in _pairs(one, other):
            text = difference(value, reference, exact=trial.exact)
            if text:
                yield draft.piece, f"{draft.piece.name}{key}: differs{text}"
            elif not trial.exact and value.numel():
                tally.furthest = max(tally.furthest, gap(value, reference))


def _each_alone(trial: Trial, drafts: Sequence[Draft]) -> bool:
    """Whether several drafts can also be stepped one by one, so that a failure is that of one parameter."""
    return len(drafts) > 1 and not steps_together(trial.recipe.name)


def _is_random(trial: Trial, drafts: Sequence[Draft], stepped: Sequence[Stepped]) -> bool:
    """Whether the same step has another result with other random numbers."""
    again = take_step(trial.recipe, drafts, trial.source, trial.place, with_state=True, draw=1)
    return any(map(_differ, stepped, again))


def _pairs(one: Stepped, other: Stepped) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    yield "", one.parameter, other.parameter
    for key, value in one.state.items():
        reference = other.state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(reference, torch.Tensor):
            yield f" ({key})", value, reference


def _without_state(trial: Trial, drafts: Sequence[Draft], others: Sequence[Stepped], tally: TrialTally) -> None:
    """Step without the stored state, and compare with the reference step, which agrees with the step on the target.

    A parameter is skipped once one of its pieces had another result.
    """
    name = trial.recipe.name
    wanted = _with_state(trial, drafts, tally)
    if not wanted:
        return
    tally.with_state.update(tally.member(drafts[index].piece.name) for index in wanted)
    stepped = range(len(drafts)) if steps_together(name) else wanted
    begun = [drafts[index] for index in stepped]
    try:
        anew = take_step(trial.reference, begun, trial.second, trial.other, with_state=False)
        _note_changes(trial, drafts, others, dict(zip(stepped, anew, strict=True)), wanted, tally)
    except STEP_ERRORS as error:
        if _each_alone(trial, drafts):
            for draft, other in zip(drafts, others, strict=True):
                _without_state(trial, [draft], [other], tally)
            return
        tally.set_parameter(drafts[0].piece)
        tally.fresh_failure.add(f"the step without the stored state fails: {error_text(error)}")


def _note_changes(
    trial: Trial,
    drafts: Sequence[Draft],
    others: Sequence[Stepped],
    fresh: dict[int, Stepped],
    wanted: Sequence[int],
    tally: TrialTally,
) -> None:
    """Record for which drafts the stored state changed the result, and the reason for the others."""
    name = trial.recipe.name
    changed = {
        index
        for index in wanted
        if _differ(others[index], fresh[index], _unchanged_state(trial, drafts[index], others[index]))
    }
    if changed and keeps_state_on_first(name):
        changed.update(wanted)
    for index in wanted:
        draft = drafts[index]
        member = tally.member(draft.piece.name)
        among, at = (drafts, index) if steps_together(name) else ([draft], 0)
        if index in changed or _differs_with_small_gradient(trial, among, at):
            tally.changed.add(member)
        elif trial.has_zero_rate(draft.piece.group) and not trial.recipe.is_foreign:
            tally.bare.setdefault(IDLE, set()).add(member)
        elif not _reads_state(trial, among, at):
            tally.bare.setdefault(IGNORED if trial.recipe.is_foreign else UNREAD, set()).add(member)


def _with_state(trial: Trial, drafts: Sequence[Draft], tally: TrialTally) -> list[int]:
    """Indices of drafts whose state should have an effect; records the reason for the others."""
    is_shared = keeps_state_on_first(trial.recipe.name)
    holder = next((draft for draft in drafts if draft.piece.entry is not None), None)
    wanted = []
    for index, draft in enumerate(drafts):
        reason = _why_without_effect(trial, holder if holder is not None and is_shared else draft)
        if reason:
            tally.bare.setdefault(reason, set()).add(tally.member(draft.piece.name))
        elif tally.member(draft.piece.name) not in tally.changed:
            wanted.append(index)
    return wanted


def _differ(one: Stepped, other: Stepped, unchanged: Container[str] = ()) -> bool:
    """Whether two steps have different results, except in step counts and in state named as by :func:`_pairs`."""
    return any(
        key != " (step)" and key not in unchanged and not same_bits(value, reference)
        for key, value, reference in _pairs(one, other)
    )


def _unchanged_state(trial: Trial, draft: Draft, after: Stepped) -> frozenset[str]:
    """State that a class of another library did not change in its step; its presence does not show that it is read."""
    if not trial.recipe.is_foreign:
        return frozenset()
    stored = stored_state(draft.piece, trial.second)
    now = {key: value for key, value in after.state.items() if isinstance(value, torch.Tensor) and key in stored}
    return frozenset(f" ({key})" for key, value in now.items() if torch.equal(stored[key].to(value.dtype), value))


def _differs_with_small_gradient(trial: Trial, among: Sequence[Draft], at: int) -> bool:
    """Whether state has an effect with a small gradient: Adamax takes the larger of gradient and state."""
    small = [draft._replace(scale=draft.scale * _SMALL_GRADIENT) for draft in among]
    one, other = (
        take_step(trial.reference, small, trial.second, trial.other, with_state=with_state)[at]
        for with_state in (True, False)
    )
    return _differ(one, other, _unchanged_state(trial, among[at], one))


def _reads_state(trial: Trial, among: Sequence[Draft], at: int) -> bool:
    """Whether other moments in memory change the step; with betas of 0 they do not, restored or not."""
    one, other = (
        take_step(trial.reference, among, trial.second, trial.other, with_state=True, moment_factor=factor)[at]
        for factor in (1.0, _MOMENT_FACTOR)
    )
    return not same_bits(one.parameter, other.parameter)


def _why_without_effect(trial: Trial, draft: Draft) -> str:
    """Why the loss of a piece's state would not show in its step; empty if it would."""
    piece = draft.piece
    if not uses_state(trial.recipe.name, trial.optimizer.groups[piece.group]):
        return READS_NOTHING
    if piece.entry is None or not piece.entry.tensors:
        return WITHOUT_STATE
    if stored_count(piece, trial.source) == 0:
        return NOT_STEPPED
    if draft.largest == 0:
        return _why_zero(trial, piece, piece.entry)
    return "" if draft.shows else TOO_SMALL


def _why_zero(trial: Trial, piece: ParameterPiece, entry: StateEntry) -> str:
    """Why a piece has no moment but zeros."""
    if trial.has_zero_rate(piece.group):
        return IDLE
    name = trial.recipe.name
    if trial.recipe.is_foreign and not any(is_moment(name, key, one.shape) for key, one in entry.tensors):
        return UNJUDGED
    return ZEROS if stored_count(piece, trial.source) is None else LOST
