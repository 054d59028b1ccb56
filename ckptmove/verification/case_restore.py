"""The resume of a case: stored model and optimizer through ``load_state_dict`` into what the user has built.

Never loads what does not fit: it says what, by name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ckptmove.pairing import parameter_shape
from ckptmove.scopes import strip_wrappers
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
    record = _matching([(_in_groups(record, case), pairing) for record, pairing in bench.pairings], case, where)
    if record is None:
        raise Mismatch(_sizes(bench.pairings, case))
    _refuse_stranger(record, case.optimizer)
    _refuse_other_order(record, case)
    try:
        case.optimizer.load_state_dict(optimizer_state(record, inventory, bench.stored))
    except STEP_ERRORS as error:
        raise Mismatch(f"optimizer.load_state_dict refuses: {' '.join(str(error).split())}") from error
    entries = sum(bool(values) for values in case.optimizer.state.values())
    named = record.where or "the optimizer's file"
    detail = f"{amount(len(state), 'tensor')} and the state of {amount(entries, 'parameter')} restored from {named}"
    return Restored(detail, entries, {**figures, "optimizer_state": record.where, "entries": entries})


def _in_groups(record: OptimizerRecord, case: Case) -> OptimizerRecord:
    """An optimizer in the groups of the case's, by name as ``set_state_dict`` has it, where the file has no groups.

    Raises:
        Mismatch: parameters of one group of the case's have different options.
    """
    if not record.is_flat:
        return record
    names = {id(parameter): name for name, parameter in case.model.named_parameters(remove_duplicate=False)}
    stored = {strip_wrappers(name)[1]: group for group in record.groups for name in group.params}
    groups = []
    for own in case.optimizer.param_groups:
        found = [stored.get(strip_wrappers(names.get(id(parameter), ""))[1]) for parameter in own["params"]]
        if not found or None in found:
            return record
        of_group = [one for one in found if one is not None]
        first = of_group[0]
        apart = next((one for one in of_group if one.options != first.options), None)
        if apart is not None:
            raise Mismatch(f"{first.where} and {apart.where} differ, and are one group in the case's optimizer")
        groups.append(first._replace(params=tuple(key for one in of_group for key in one.params)))
    return record._replace(groups=tuple(groups), is_flat=False)


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


def _refuse_other_order(record: OptimizerRecord, case: Case) -> None:
    """Refuse state whose shapes are those of the optimizer's parameters at other places: it is loaded by position."""
    known = {entry.key: parameter_shape(entry, record.algorithm) for entry in record.state}
    names = {id(one): f"model.{name}" for name, one in case.model.named_parameters()}
    keys = [key for group in record.groups for key in group.params]
    own = [one for group in case.optimizer.param_groups for one in group["params"]]
    pairs = [(key, shape, one) for key, one in zip(keys, own, strict=True) if (shape := known.get(key)) is not None]
    apart = [(key, shape, one) for key, shape, one in pairs if shape != tuple(one.shape)]
    if apart and Counter(shape for _, shape, _ in pairs) <= Counter(tuple(one.shape) for one in own):
        key, shape, one = apart[0]
        place = names.get(id(one), "the parameter")
        raise Mismatch(
            "the case's optimizer has its parameters in another order than the checkpoint, and load_state_dict goes by "
            f"position: the state of {key} is for {list(shape)}, and {place} at its place is {list(one.shape)}; "
            "give them to it in the order of the run that was saved"
        )
