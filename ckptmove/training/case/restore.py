"""Restore the stored models and optimizers into a case with ``load_state_dict``."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptmove.checkpoint.pairing import parameter_shape
from ckptmove.checkpoint.roles import is_kept_aside
from ckptmove.checkpoint.state_dicts import without_wrappers
from ckptmove.proof.restored.loaded import LoadedFiles
from ckptmove.proof.step.stored_state import (
    Mismatch,
    ambiguous,
    is_inside,
    model_state,
    no_part,
    optimizer_state_dict,
    place_of,
)
from ckptmove.proof.step.trial import STEP_ERRORS
from ckptmove.proof.tensors.wrappers import WithWrappers
from ckptmove.text import amount, some
from ckptmove.training.case.parts import by_key, models_of, optimizers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn

    from ckptmove.case import Case
    from ckptmove.checkpoint.pairing import Pairing
    from ckptmove.model import OptimizerRecord
    from ckptmove.proof.step.resume import Bench
    from ckptmove.proof.tensors.pieces import TensorSource
    from ckptmove.training.case.parts import ModelPart, OptimizerPart

#: Each loads the other's state and options.
_SAME = frozenset({"Adam", "AdamW"})


class Restored(NamedTuple):
    """Result of a restore."""

    detail: str  # summary in a sentence
    entries: dict[str, int]  # number of parameters with state, for each optimizer by its key in the case
    left: tuple[str, ...]  # paths of stored optimizers without an optimizer of the case; copies excluded
    figures: dict[str, Any]  # the evidence
    #: the stored groups of each optimizer, by its key in the case.
    groups: Mapping[str, Sequence[Mapping[str, Any]]] = {}


def restore_case(bench: Bench, case: Case) -> Restored:
    """Load the stored state into a case, the models first."""
    places: dict[str, str] = {}
    tensors: dict[str, int] = {}
    cast: list[str] = []
    for model in models_of(case):
        places[model.key], tensors[model.key], own_cast = _restore_model(bench, model)
        cast += own_cast
    figures: dict[str, object] = {"model": by_key(places), "tensors": by_key(tensors), "cast": cast}
    stored = {record.name for record in bench.checkpoint.inventory.tensors}
    figures["keys_as_stored"] = all(
        (f"{places[model.key]}.{key}" if places[model.key] else key) in stored
        for model in models_of(case)
        for key, value in own_state(model.module).items()
        if isinstance(value, torch.Tensor)
    )
    count = amount(sum(tensors.values()), "tensor")
    optimizers = optimizers_of(case)
    if not bench.pairings:
        detail = f"{count} restored; there is no optimizer state, so the optimizer starts fresh"
        none = dict.fromkeys((one.key for one in optimizers), "")
        entries = dict.fromkeys(none, 0)
        return Restored(detail, entries, (), {**figures, "optimizer_state": by_key(none), "entries": by_key(entries)})
    # Loaded once more: a script that imports the library of a wrapper subclass has let torch.load return it since.
    source = WithWrappers(bench.stored, LoadedFiles(bench.checkpoint.parts, bench.stored))
    restored = {one.key: _restore_optimizer(bench, case, one, places.values(), source) for one in optimizers}
    found = {key: where for key, (where, _) in restored.items()}
    groups = {key: stored for key, (_, stored) in restored.items()}
    entries = {one.key: sum(bool(values) for values in one.optimizer.state.values()) for one in optimizers}
    named = " and ".join(where or "the optimizer's file" for where in found.values())
    state = amount(sum(entries.values()), "parameter")
    figures |= {"optimizer_state": by_key(found), "entries": by_key(entries)}
    figures["frozen"] = [path for one in optimizers for path in frozen_in(bench, found[one.key], one)]
    places_left = [one.where for one, _ in bench.pairings if one.where not in found.values()]
    left = tuple(where for where in places_left if not is_kept_aside(where))
    return Restored(f"{count} and the state of {state} restored from {named}", entries, left, figures, groups)


def _restore_model(bench: Bench, model: ModelPart) -> tuple[str, int, list[str]]:
    """Load a model; returns the path of its state_dict, the number of tensors in it, and those that were cast."""
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
    cast = [f"{model.name}.{key}" for key, value in state.items() if tensors[key].dtype != value.dtype]
    return where, len(state), cast


def cast_text(names: Sequence[str]) -> str:
    """The reason why a model with these tensors is not restored bit for bit."""
    return f"{amount(len(names), 'tensor')} of the file cast to the dtype of the model ({some(names, 3)})"


def own_state(module: nn.Module) -> dict[str, Any]:
    """The state_dict of a model, with the parameters themselves if its ``state_dict`` takes ``keep_vars``."""
    taken = inspect.signature(module.state_dict).parameters.values()
    takes_it = any(one.name == "keep_vars" or one.kind is one.VAR_KEYWORD for one in taken)
    own: dict[str, Any] = module.state_dict(keep_vars=True) if takes_it else module.state_dict()
    return own


def _restore_optimizer(
    bench: Bench, case: Case, own: OptimizerPart, models: Collection[str], source: TensorSource
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Load an optimizer; returns the path of its state_dict and its groups there."""
    record = matching_optimizer(bench.pairings, case, own, models)
    _require_class(record, own)
    _require_shapes(record, case, own)
    state = optimizer_state_dict(record, bench.checkpoint.inventory, source)
    try:
        own.optimizer.load_state_dict(state)
    except STEP_ERRORS as error:
        raise Mismatch(f"{own.name}.load_state_dict refuses: {' '.join(str(error).split())}") from error
    return record.where, state["param_groups"]


def frozen_in(bench: Bench, where: str, own: OptimizerPart) -> list[str]:
    """Paths of the stored parameters without state that are frozen in an optimizer; paths as in finding O205.

    Args:
        where: path of the stored optimizer that was restored.
    """
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
