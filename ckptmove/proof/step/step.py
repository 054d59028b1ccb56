"""Make one real step of an optimizer after restoring its state with ``load_state_dict``."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.proof.step.entries import each_tensor, leaves, nested_state
from ckptmove.proof.step.objective import needs_closure, quadratic
from ckptmove.proof.step.recipe import NOISE_PERIOD
from ckptmove.proof.tensors.dtypes import dtype_of
from ckptmove.proof.tensors.wrappers import copied, is_wrapper, opened
from ckptmove.torch_facts.optimizers import is_moment, magnitudes, wants_sparse

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ckptmove.model import StateEntry
    from ckptmove.proof.place import StepDevice
    from ckptmove.proof.step.entries import TensorOption
    from ckptmove.proof.step.recipe import Recipe
    from ckptmove.proof.tensors.pieces import ParameterPiece, TensorSource


#: Smallest gradient scale for LBFGS; below its tolerances it stops before the first step.
_LEAST_OF_FIRST: Final = 2.0**-10
#: The curvature from its history is clamped to this factor and its inverse.
_MOST_CURVED: Final = 2.0**10


class Draft(NamedTuple):
    """A piece with the scale of its gradient."""

    piece: ParameterPiece
    largest: float  # largest gradient, estimated from its moments
    shows: bool  # whether a gradient of this size has an effect on the step
    scale: float  # factor of the gradient's values, a power of two
    curvature: float = 1.0  # curvature of the objective, for an optimizer that evaluates its own gradients


@dataclass(slots=True)
class Stepped:
    """A piece after its step, on the CPU."""

    parameter: torch.Tensor  # values after the step
    state: dict[str, Any] = field(default_factory=dict)  # state after the step
    #: state keys whose tensor changed its device or is not on its parameter's device, as text.
    strays: list[str] = field(default_factory=list)
    #: state keys that ``load_state_dict`` cast, with the dtypes before and after.
    casts: list[tuple[str, str, str]] = field(default_factory=list)
    #: state keys that the update divides by and a cast rounded to zero, as text.
    vanished: list[str] = field(default_factory=list)


def scaled(piece: ParameterPiece, source: TensorSource, name: str) -> Draft:
    """Scale the gradient of a piece to the magnitude of its moments.

    With a larger gradient the effect of the state would be lost in rounding.
    """
    largest = 0.0
    for key, record in piece.entry.tensors if piece.entry is not None else ():
        if not is_moment(name, key, record.shape):
            continue
        values = piece.of(record, source)
        values = values.dequantize() if is_wrapper(values) else values
        if values.numel():
            highest = _largest_magnitude(values)
            largest = max(largest, math.sqrt(highest) if key in magnitudes(name) else highest)
    dtype = dtype_of(piece.parameter.dtype)
    # The square of a gradient must not underflow in half precision, whose exponents end at 2**-24.
    least = 2.0**-4 if dtype == torch.float16 else 2.0**-40
    shows = (dtype.is_floating_point or dtype.is_complex) and largest >= least * torch.finfo(dtype).eps
    scale = 2.0 ** math.floor(math.log2(min(max(largest, least), 1.0))) if shows else 1.0
    return Draft(piece, largest, shows, scale)


def _largest_magnitude(values: torch.Tensor) -> float:
    """The largest magnitude, without a copy for real values; NaN if any value is NaN."""
    if values.dtype == torch.bool:
        return 0.0
    if not values.is_floating_point():
        return float(values.abs().max())
    lowest, highest = torch.aminmax(values)
    return max(-float(lowest), float(highest))


def as_one(drafts: Sequence[Draft], source: TensorSource) -> list[Draft]:
    """Scale all gradients alike for state on the first parameter (LBFGS), with the curvature of its history."""
    holder = next((draft for draft in drafts if draft.largest), None)
    if holder is None:
        return list(drafts)
    record = holder.piece.entry.tensor("H_diag") if holder.piece.entry is not None else None
    inverse = 1.0 if record is None or record.shape else float(source.tensor(record).item())
    curvature = 1 / inverse if inverse > 0 else 1.0
    return [
        draft._replace(
            largest=holder.largest,
            shows=holder.shows,
            scale=max(holder.scale, _LEAST_OF_FIRST),
            curvature=min(max(curvature, 1 / _MOST_CURVED), _MOST_CURVED),
        )
        for draft in drafts
    ]


def noise_like(values: torch.Tensor, piece: ParameterPiece, noise: torch.Tensor, scale: float) -> torch.Tensor:
    """Seeded values in the shape of others; they depend on the piece and not on the device or batch."""
    count = values.numel() * (2 if values.is_complex() else 1)
    start = (zlib.crc32(piece.name.encode(errors="replace")) + piece.offset) % NOISE_PERIOD
    enough = noise if start + count <= len(noise) else noise[:NOISE_PERIOD].repeat(2 + count // NOISE_PERIOD)
    flat = enough[start : start + count] * scale
    if values.is_complex():
        return torch.view_as_complex(flat.view(*values.shape, 2)).to(values.dtype)
    return flat.view(values.shape).to(values.dtype)


def take_step(
    recipe: Recipe,
    drafts: Sequence[Draft],
    source: TensorSource,
    place: StepDevice,
    *,
    with_state: bool,
    moment_factor: float | None = None,
    draw: int = 0,
) -> list[Stepped]:
    """Step some pieces as one optimizer.

    Args:
        drafts: the pieces, in the order of their groups.
        place: device of the step. Parameters are moved there, and state that the file does not have on the CPU.
        with_state: whether to restore the stored state; otherwise the optimizer starts fresh.
        moment_factor: factor for the stored moments, which are then set without ``load_state_dict``; None for none.
        draw: seed for the random numbers of a class of another library.

    Returns:
        The outcome for each piece.
    """
    # Prepare on the CPU: the modes of a simulated device run Python code for each operation of torch.
    with recipe.running():
        parameters = [_parameter(draft, source, place, recipe) for draft in drafts]
        saved = _saved(recipe, drafts, source, place, with_state=with_state)
    with place.active(), recipe.running(draw):
        optimizer, stored = _restored(recipe, drafts, parameters, saved, with_state=with_state)
        restored = [opened(leaves(optimizer.state.get(parameter, {}))) for parameter in parameters]
        before = [_devices(one, place) for one in restored]
        casts = [_casts(recipe.name, one, other) for one, other in zip(stored, restored, strict=True)]
        vanished = [
            _vanished(stored[index], one, place, [key for key, _, _ in casts[index] if key in magnitudes(recipe.name)])
            for index, one in enumerate(restored)
        ]
        if moment_factor is not None:
            for draft, parameter in zip(drafts, parameters, strict=True):
                entry = draft.piece.entry
                optimizer.state[parameter] = (
                    {} if entry is None else _state(recipe.name, draft.piece, entry, source, place, moment_factor)
                )
        _step(optimizer, parameters, drafts)
        rates = frozenset(
            place.device_of(value)
            for group in optimizer.param_groups
            for value in group.values()
            if isinstance(value, torch.Tensor)
        )
        stepped = [
            _stepped(
                recipe.name, parameter, opened(leaves(optimizer.state.get(parameter, {}))), place, before[index], rates
            )
            for index, parameter in enumerate(parameters)
        ]
    for one, own_casts, own_vanished in zip(stepped, casts, vanished, strict=True):
        one.casts, one.vanished = own_casts, own_vanished
    return stepped


def step_without_file(recipe: Recipe, drafts: Sequence[Draft], source: TensorSource, place: StepDevice) -> None:
    """Step pieces twice with default options: without state, and from the state that the first step made.

    Only the state of the parameters is restored, as in :func:`take_step`.
    """
    with recipe.running():
        parameters = [_parameter(draft, source, place, recipe) for draft in drafts]
    with place.active(), recipe.running():
        first, second = recipe.optimizer(parameters), recipe.optimizer(parameters)
        _step(_in_training(first), parameters, drafts)
        saved = first.state_dict()
        state = {key: value for key, value in saved["state"].items() if isinstance(key, int)}
        second.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
        _step(_in_training(second), parameters, drafts)


def _in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Put an optimizer in training mode, as a script does after loading; torch's own classes have no modes.

    Optimizers of schedulefree are saved in evaluation mode, in which they refuse to step. The Trainer of transformers
    calls ``train`` of any optimizer that has it.
    """
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()
    return optimizer


def _saved(
    recipe: Recipe, drafts: Sequence[Draft], source: TensorSource, place: StepDevice, *, with_state: bool
) -> dict[str, Any]:
    """The stored state_dict of the optimizer, with the indices of the pieces as keys of its parameters."""
    groups = [
        {**recipe.groups[group], **_options(recipe.tensors[group], source, place), "params": members}
        for group, members in _members(drafts).items()
    ]
    entries = {index: draft.piece.entry for index, draft in enumerate(drafts)} if with_state else {}
    state = {
        index: _state(recipe.name, drafts[index].piece, entry, source, place)
        for index, entry in entries.items()
        if entry is not None
    }
    return {"state": state, "param_groups": groups}


def _members(drafts: Sequence[Draft]) -> dict[int, list[int]]:
    """The indices of the pieces of each group."""
    members: dict[int, list[int]] = {group: [] for group in sorted({draft.piece.group for draft in drafts})}
    for index, draft in enumerate(drafts):
        members[draft.piece.group].append(index)
    return members


def _restored(
    recipe: Recipe,
    drafts: Sequence[Draft],
    parameters: Sequence[torch.Tensor],
    saved: dict[str, Any],
    *,
    with_state: bool,
) -> tuple[torch.optim.Optimizer, list[dict[str, Any]]]:
    """Restore an optimizer as a script does; return it and the state loaded for each parameter."""
    optimizer = recipe.optimizer(
        [{"params": [parameters[index] for index in members]} for members in _members(drafts).values()]
    )
    # Adagrad makes its state in the constructor; in old torch only there.
    state = saved["state"] if with_state else optimizer.state_dict()["state"]
    optimizer.load_state_dict({**saved, "state": state})
    found = [opened(leaves(state.get(index, {}))) for index in range(len(drafts))]
    return _in_training(optimizer), found


def copy_to(tensor: torch.Tensor, tag: str, place: StepDevice) -> torch.Tensor:
    """Copy a stored tensor: to the CPU if the file has it there, else to the place's device.

    A wrapper subclass stays on the CPU: ``load_state_dict`` moves it to its parameter's device as a whole.
    """
    if is_wrapper(tensor):
        return copied(tensor)
    return tensor.detach().clone() if tag == "cpu" else place.to_device(tensor)


def stored_values(piece: ParameterPiece, source: TensorSource) -> torch.Tensor:
    """Values of a piece before the step; zeros, which show the smallest update, if the file has none."""
    values = piece.of(piece.parameter, source)
    return values if piece.is_stored else torch.zeros_like(values)


def stored_state(piece: ParameterPiece, source: TensorSource) -> dict[str, torch.Tensor]:
    """Tensors in a piece's state before the step, by path, with wrapper subclasses opened."""
    stored = () if piece.entry is None else piece.entry.tensors
    return opened({key: piece.of(record, source) for key, record in stored})


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], drafts: Sequence[Draft]) -> None:
    if needs_closure(optimizer):
        optimizer.step(quadratic(parameters, drafts[0].curvature / drafts[0].scale))
    else:
        optimizer.step()


def _parameter(draft: Draft, source: TensorSource, place: StepDevice, recipe: Recipe) -> torch.Tensor:
    values = stored_values(draft.piece, source)
    parameter = place.to_device(values).requires_grad_()
    gradient = noise_like(values, draft.piece, recipe.noise, draft.scale)
    # Sparse gradients contain every row: other rows would be neither moved nor read.
    gradient = gradient.to_sparse(1) if wants_sparse(recipe.name) else gradient
    parameter.grad = place.to_device(gradient, copy=False)
    return parameter


def _state(
    name: str, piece: ParameterPiece, entry: StateEntry, source: TensorSource, place: StepDevice, factor: float = 1.0
) -> dict[str, object]:
    tensors: dict[str, object] = {}
    for key, record in entry.tensors:
        value = copy_to(piece.of(record, source), record.device, place)
        is_scaled = factor != 1 and (value.is_floating_point() or value.is_complex())
        if is_scaled and is_moment(name, key, record.shape):
            value = value.copy_(value.dequantize() * factor) if is_wrapper(value) else value * factor
        tensors[key] = value
    return nested_state(entry, tensors)


def _options(options: Mapping[str, TensorOption], source: TensorSource, place: StepDevice) -> dict[str, object]:
    return {
        name: each_tensor(option, lambda record: copy_to(source.tensor(record), record.device, place))
        for name, option in options.items()
    }


def _devices(state: Mapping[str, Any], place: StepDevice) -> dict[str, str]:
    return {key: place.device_of(value) for key, value in state.items() if isinstance(value, torch.Tensor)}


def _casts(name: str, stored: Mapping[str, Any], restored: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Moments that were cast to the parameter's dtype; ``step`` is always float32."""
    return [
        (key, str(value.dtype).removeprefix("torch."), str(restored[key].dtype).removeprefix("torch."))
        for key, value in stored.items()
        if isinstance(value, torch.Tensor) and key in restored and value.dtype != restored[key].dtype
        if is_moment(name, key, value.shape)
    ]


def _vanished(
    stored: Mapping[str, Any], restored: Mapping[str, Any], place: StepDevice, keys: Sequence[str]
) -> list[str]:
    """Cast keys with values that became zero, as text."""
    found = []
    for key in keys:
        count = int(((place.to_cpu(stored[key]) != 0) & (place.to_cpu(restored[key]) == 0)).sum())
        if count:
            found.append(f"load_state_dict casts {key} to {restored[key].dtype}, which makes {count:,} of its values 0")
    return found


def _stepped(
    name: str,
    parameter: torch.Tensor,
    state: Mapping[str, Any],
    place: StepDevice,
    before: Mapping[str, str],
    rates: Collection[str],
) -> Stepped:
    """The result for one parameter.

    Args:
        parameter: values after the step.
        state: state after the step, by path.
        before: device of each state tensor before the step.
        rates: devices of tensor options. A scalar computed from one is on its device: LBFGS has ``t = lr``.
    """
    stepped = Stepped(place.to_cpu(parameter))
    home = place.device_of(parameter)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            stepped.state[key] = value
            continue
        # A simulated device keeps a wrapper subclass unchanged, so the result may be one.
        stepped.state |= {inner: place.to_cpu(one) for inner, one in opened({key: place.to_cpu(value)}).items()}
        device, is_of_parameter = place.device_of(value), is_moment(name, key, value.shape)
        belongs = home if is_of_parameter else before.get(key, device)
        if device != belongs and (is_of_parameter or device not in rates):
            stepped.strays.append(f"{key} is on {device}, but belongs on {belongs}")
    return stepped
