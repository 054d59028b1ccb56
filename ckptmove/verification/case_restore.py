"""The resume of a case: stored model and optimizer through ``load_state_dict`` into what the user has built.

Never loads what does not fit: it says what, by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckptmove.verification.stored_state import Mismatch, model_state, optimizer_state
from ckptmove.verification.trial import STEP_ERRORS
from ckptmove.wording import amount

if TYPE_CHECKING:
    from ckptmove.case import Case
    from ckptmove.model import OptimizerRecord
    from ckptmove.pairing import Pairing
    from ckptmove.verification.resume import Bench

#: Each takes the other's state and options, and steps as these say.
_SAME = frozenset({"Adam", "AdamW"})


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of the resume.

    Attributes:
        detail: what was restored.
        entries: parameters that the optimizer has state for now.
        figures: the evidence.
    """

    detail: str
    entries: int
    figures: dict[str, object] = field(default_factory=dict)


def restore(bench: Bench, case: Case) -> Restored:
    """Load the stored state into a case, the model first.

    Raises:
        Mismatch: it does not fit.
        UnreadableInput: a tensor's bytes cannot be had.
    """
    inventory = bench.checkpoint.inventory
    own: dict[str, Any] = case.model.state_dict(keep_vars=True)
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    where, state = model_state(tensors, inventory, bench.stored)
    others = {key: value for key, value in own.items() if key not in tensors}  # extra state, which has no bytes
    try:
        case.model.load_state_dict({**others, **state}, strict=True)
    except STEP_ERRORS as error:
        raise Mismatch(f"model.load_state_dict refuses: {' '.join(str(error).split())}") from error
    figures: dict[str, object] = {"model": where, "tensors": len(state)}
    if not bench.pairings:
        detail = f"{amount(len(state), 'tensor')} restored, and no optimizer state is there: it begins anew"
        return Restored(detail, 0, {**figures, "optimizer_state": "", "entries": 0})
    record = _matching(bench.pairings, case, where)
    if record is None:
        raise Mismatch(_sizes(bench.pairings, case))
    _refuse_stranger(record, case.optimizer)
    try:
        case.optimizer.load_state_dict(optimizer_state(record, inventory, bench.stored))
    except STEP_ERRORS as error:
        raise Mismatch(f"optimizer.load_state_dict refuses: {' '.join(str(error).split())}") from error
    entries = sum(bool(values) for values in case.optimizer.state.values())
    named = record.where or "the optimizer's file"
    detail = f"{amount(len(state), 'tensor')} and the state of {amount(entries, 'parameter')} restored from {named}"
    return Restored(detail, entries, {**figures, "optimizer_state": record.where, "entries": entries})


def _matching(pairings: list[tuple[OptimizerRecord, Pairing]], case: Case, where: str) -> OptimizerRecord | None:
    """The stored optimizer whose groups are as large as the case's; of several, the one that steps the same model."""
    sizes = [len(group["params"]) for group in case.optimizer.param_groups]
    fitting = [pair for pair in pairings if [len(group.params) for group in pair[0].groups] == sizes]
    beside = [
        record
        for record, pairing in fitting
        if any(one is not None and one.name.startswith(f"{where}.") for _, one in pairing.matches)
    ]
    return next(iter([*beside, *(record for record, _ in fitting)]), None)


def _sizes(pairings: list[tuple[OptimizerRecord, Pairing]], case: Case) -> str:
    own = [len(group["params"]) for group in case.optimizer.param_groups]
    stored = [
        f"{record.where or 'the optimizer'} has {_listed([len(group.params) for group in record.groups])}"
        for record, _ in pairings
    ]
    return f"the optimizer does not fit the checkpoint: {', '.join(stored)}, and the case's has {_listed(own)}"


def _listed(sizes: list[int]) -> str:
    return f"{amount(len(sizes), 'group')} of {' and '.join(map(str, sizes)) or 'no'} parameters"


def _refuse_stranger(record: OptimizerRecord, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state of another one of torch's classes, which ``load_state_dict`` would take in silence."""
    names = {kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")}
    names -= {"Optimizer"}
    stored = frozenset(record.candidates)
    if not stored or not names or names & stored or (names & _SAME and stored & _SAME):
        return
    raise Mismatch(
        f"{record.where or 'the optimizer'} holds the state of {' or '.join(record.candidates)}, "
        f"and the case's optimizer is {type(optimizer).__name__}"
    )
