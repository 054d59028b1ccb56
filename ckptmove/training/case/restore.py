"""Restore the stored models and optimizers into a case with ``load_state_dict``."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from ckptmove.checkpoint.pairing import parameter_shape
from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.checkpoint.state_dicts import without_wrappers
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.step.stored_state import (
    Mismatch,
    ambiguous,
    is_inside,
    left_out,
    model_state,
    no_part,
    optimizer_state_dict,
    place_of,
)
from ckptmove.proof.step.trial import STEP_ERRORS
from ckptmove.proof.tensors.wrappers import WithWrappers
from ckptmove.text import amount
from ckptmove.training.case.parts import models_of, optimizers_of
from ckptmove.training.case.step import OwnSteps
from ckptmove.training.outcome import RestoredModel, SteppedOptimizer

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from ckptmove.case import Case
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import Inventory, OptimizerRecord
    from ckptmove.proof.place import StepDevice
    from ckptmove.proof.step.resume import Bench
    from ckptmove.proof.tensors.pieces import TensorSource
    from ckptmove.training.case.parts import ModelPart, OptimizerPart

#: Each loads the other's state and options.
_SAME = frozenset({"Adam", "AdamW"})


def restore_case(bench: Bench, case: Case, place: StepDevice) -> tuple[list[RestoredModel], list[SteppedOptimizer]]:
    """Load the stored state into a case, the models first."""
    models = [_restore_model(bench, one) for one in models_of(case)]
    optimizers = [SteppedOptimizer(one, OwnSteps(one, place)) for one in optimizers_of(case)]
    if not bench.pairings:
        return models, optimizers
    # Loaded once more: a script that imports the library of a wrapper subclass has let torch.load return it since.
    source = WithWrappers(bench.stored, LoadedFiles(bench.checkpoint.parts, bench.stored))
    places = [one.where or "" for one in models]
    return models, [_restore_optimizer(bench, case, one, places, source) for one in optimizers]


def _restore_model(bench: Bench, model: ModelPart) -> RestoredModel:
    own = own_state(model.module)
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    inventory, name = bench.checkpoint.inventory, model.label
    try:
        where, state = model_state(tensors, inventory, bench.stored, model.part, name=name)
    except Mismatch as error:
        error.module, error.part = model.module, model.part
        raise
    others = {key: value for key, value in own.items() if key not in tensors}  # extra state, which has no bytes
    try:
        model.module.load_state_dict({**others, **state}, strict=True)
    except STEP_ERRORS as error:
        raise Mismatch(f"{model.name}.load_state_dict refuses: {' '.join(str(error).split())}") from error
    cast = (f"{model.name}.{key}" for key, value in state.items() if tensors[key].dtype != value.dtype)
    return RestoredModel(model, where, len(state), len(state), cast=(*cast,), fault=_stand_in(inventory, model, where))


def _stand_in(inventory: Inventory, model: ModelPart, where: str) -> str:
    """That a copy of the model was restored because the model itself does not fit; empty if that is not so."""
    roles = {record.role for record in inventory.tensors if is_inside(record.name, where)}
    is_copy = model.part is None and "ema" in roles and "model" not in roles
    if not is_copy or all(record.role != "model" for record in inventory.tensors):
        return ""
    return f"{model.label} does not fit the model in the file, and was restored from {where}"


def own_state(module: nn.Module) -> dict[str, Any]:
    """The state_dict of a model, with the parameters themselves if its ``state_dict`` takes ``keep_vars``."""
    taken = inspect.signature(module.state_dict).parameters.values()
    takes_it = any(one.name == "keep_vars" or one.kind is one.VAR_KEYWORD for one in taken)
    own: dict[str, Any] = module.state_dict(keep_vars=True) if takes_it else module.state_dict()
    return own


def _restore_optimizer(
    bench: Bench, case: Case, stepped: SteppedOptimizer, models: Collection[str], source: TensorSource
) -> SteppedOptimizer:
    own = stepped.part
    record = matching_optimizer(bench.pairings, case, own, models)
    _require_class(record, own)
    _require_shapes(record, case, own)
    state = optimizer_state_dict(record, bench.checkpoint, source, bench.request.limits)
    try:
        own.optimizer.load_state_dict(state)
    except STEP_ERRORS as error:
        raise Mismatch(f"{own.name}.load_state_dict refuses: {' '.join(str(error).split())}") from error
    entries = sum(bool(values) for values in own.optimizer.state.values())
    return stepped._replace(
        where=record.where,
        entries=entries,
        stored=entries,
        groups=tuple(state["param_groups"]),
        left_out=left_out(record, state),
        frozen=tuple(frozen_in(bench, record.where, own)),
    )


def frozen_in(bench: Bench, where: str, own: OptimizerPart) -> list[str]:
    """Paths, as in finding O205, of the parameters without state in a stored optimizer that are frozen in another."""
    record = next(record for record, _ in bench.pairings if record.where == where)
    if record.is_flat:
        return []  # its parameters may be in another order
    paths = [(f"{group.where}.params.{key}", key) for group in record.groups for key in group.params]
    stored = {entry.key for entry in record.state if entry.tensors}
    pairs = zip(paths, own.parameters, strict=True)
    return [path for (path, key), one in pairs if key not in stored and not one.requires_grad]


def _in_groups(record: OptimizerRecord, case: Case, own: OptimizerPart) -> OptimizerRecord:
    """A flat optimizer of ``flatten_optimizer_state_dict`` in the groups of that of the case."""
    if not record.is_flat:
        return record
    modules = [model.module for model in models_of(case)]
    names = {id(one): name for module in modules for name, one in module.named_parameters(remove_duplicate=False)}
    stored = {without_wrappers(name): group for group in record.groups for name in group.params}
    groups = []
    for group in own.optimizer.param_groups:
        found = [stored.get(without_wrappers(names.get(id(parameter), ""))) for parameter in group["params"]]
        if not found or None in found:
            return record
        of_group = [one for one in found if one is not None]
        first = of_group[0]
        apart = next((one for one in of_group if one.options != first.options), None)
        if apart is not None:
            raise Mismatch(
                f"{first.where} and {apart.where} have different options, but are one group in the case's optimizer"
            )
        groups.append(first._replace(params=tuple(key for one in of_group for key in one.params)))
    return record._replace(groups=tuple(groups), is_flat=False)


def matching_optimizer(
    pairings: list[tuple[OptimizerRecord, Pairing]], case: Case, own: OptimizerPart, models: Collection[str]
) -> OptimizerRecord:
    """The stored optimizer that fits one of the case's, by the sizes of its groups, its class, and its shapes.

    Of several, the one for the models that were restored.
    """
    inside = [(record, pairing) for record, pairing in pairings if is_inside(record.where, own.part)]
    if own.part is not None and not inside:
        names = tuple(record.where for record, _ in pairings if record.where)
        raise no_part(own.label, own.part, "optimizer_part", names)
    grouped = [(_in_groups(record, case, own), pairing) for record, pairing in inside]
    sizes = [len(group["params"]) for group in own.optimizer.param_groups]
    fitting = [(record, pairing) for record, pairing in grouped if _group_sizes(record) == sizes]
    if not fitting:
        several = len(inside) > 1
        stored = [_groups(_group_sizes(record)) + f" ({record.where})" * several for record, _ in inside]
        groups = f"in the checkpoint: {', '.join(stored)}; in the case: {_groups(sizes)}"
        raise Mismatch(f"{own.label} does not fit the checkpoint; {groups}")
    same = [pair for pair in fitting if not _is_other_class(pair[0], own) and not _other_shape(pair[0], own)]
    places = [where for where in models if where]
    stepping = [
        (record, pairing)
        for record, pairing in same
        if any(one is not None and is_inside(one.name, where) for _, one in pairing.matches for where in places)
    ]
    left = [record for record, _ in stepping or same]
    chosen = [record for record in left if not is_kept_aside(record.where)] or left
    if len(chosen) > 1:
        raise ambiguous(own.label, "optimizer_part", tuple(record.where for record in chosen))
    return chosen[0] if chosen else fitting[0][0]


def _group_sizes(record: OptimizerRecord) -> list[int]:
    return [len(group.params) for group in record.groups]


def _groups(sizes: list[int]) -> str:
    """``2 groups of 3 and 1 parameters``, ``4 groups of 1 parameter each``."""
    is_even = len(set(sizes)) <= 1
    listed = amount(max(sizes, default=0), "parameter") if is_even else f"{' and '.join(map(str, sizes))} parameters"
    return f"{amount(len(sizes), 'group')} of {listed}" + " each" * (is_even and len(sizes) > 1)


def _is_other_class(record: OptimizerRecord, own: OptimizerPart) -> bool:
    """Whether state is of another class of torch: ``load_state_dict`` would load it without an error."""
    names = {kind.__name__ for kind in type(own.optimizer).__mro__ if kind.__module__.startswith("torch.optim")}
    names -= {"Optimizer"}
    stored = frozenset(record.candidates)
    return bool(stored and names) and not (names & stored or (names & _SAME and stored & _SAME))


def _require_class(record: OptimizerRecord, own: OptimizerPart) -> None:
    if _is_other_class(record, own):
        raise Mismatch(
            f"{record.where or 'the optimizer'} holds the state of {' or '.join(record.candidates)}, "
            f"and the case's {own.name} is {type(own.optimizer).__name__}"
        )


def _other_shape(record: OptimizerRecord, own: OptimizerPart) -> tuple[str, tuple[int, ...], torch.Tensor, bool] | None:
    """The first state whose parameter has another shape: ``load_state_dict`` goes by index alone.

    Returns:
        Key and shape of the stored parameter, the parameter of the case at its index, and whether the optimizer of the
        case has parameters of all stored shapes, in another order.
    """
    known = {entry.key: parameter_shape(entry, record.algorithm) for entry in record.state}
    keys = [key for group in record.groups for key in group.params]
    parameters = own.parameters
    pairs = [
        (key, shape, one) for key, one in zip(keys, parameters, strict=True) if (shape := known.get(key)) is not None
    ]
    is_order = Counter(shape for _, shape, _ in pairs) <= Counter(tuple(one.shape) for one in parameters)
    apart = ((key, shape, one, is_order) for key, shape, one in pairs if shape != tuple(one.shape))
    return next(apart, None)


def _require_shapes(record: OptimizerRecord, case: Case, own: OptimizerPart) -> None:
    """Raise Mismatch for state of other shapes; in a class that is not torch's, moments may have any shape."""
    apart = _other_shape(record, own)
    is_torchs = type(own.optimizer).__module__.startswith("torch.optim")
    if apart is None or not (apart[-1] or is_torchs):
        return
    key, shape, parameter, is_order = apart
    names = {
        id(one): f"{model.name}.{name}" for model in models_of(case) for name, one in model.module.named_parameters()
    }
    place = names.get(id(parameter), "the parameter")
    which = f"the state of {key} has shape {list(shape)}, but {place} in its position has shape "
    which += str(list(parameter.shape))
    if not is_order:
        raise Mismatch(f"{own.label} does not fit {place_of(record.where)}: {which}")
    raise Mismatch(
        f"the case's {own.name} has its parameters in another order than the checkpoint, and load_state_dict matches "
        f"by position: {which}; pass them in the order of the saved run"
    )
