"""One real step of a ``torch.optim`` class, its state restored through ``load_state_dict``.

Never writes to a stored tensor, and never judges the outcome.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.verification.optimizers import SECOND_MOMENTS
from ckptmove.verification.pieces import WINDOW_ELEMENTS
from ckptmove.verification.state import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ckptmove.model import Inventory, OptimizerRecord, StateEntry, TensorRecord
    from ckptmove.verification.pieces import Piece, TensorSource
    from ckptmove.verification.place import Place

_NOISE_PERIOD: Final = 65_537


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step needs besides parameters and state.

    Attributes:
        name: class in ``torch.optim``.
        optimizer: the class itself.
        groups: plain options of every group, flags included.
        tensors: for every group, the options that are tensors (a ``lr`` that a compiled step can change).
        noise: values that gradients are made of.
        assumed: options that the file holds as objects, and not as plain values: the class's defaults stand in.
    """

    name: str
    optimizer: Callable[[Any], torch.optim.Optimizer]
    groups: tuple[dict[str, object], ...]
    tensors: tuple[dict[str, TensorRecord], ...]
    noise: torch.Tensor
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A piece with the magnitude of its gradient.

    Attributes:
        piece: the piece.
        magnitude: the largest gradient that its moments speak of; 0 where they are too small to show in a step.
        scale: what the gradient's values are multiplied with: a power of two.
    """

    piece: Piece
    magnitude: float
    scale: float


@dataclass(slots=True)
class Stepped:
    """A piece after its step, on the CPU.

    Attributes:
        parameter: the new values.
        state: the new state.
        strays: state keys whose tensor changed its device, or is not with its parameter: text for people.
        casts: state keys that ``load_state_dict`` gave another dtype, with the dtypes before and after.
    """

    parameter: torch.Tensor
    state: dict[str, Any] = field(default_factory=dict)
    strays: list[str] = field(default_factory=list)
    casts: list[tuple[str, str, str]] = field(default_factory=list)


def make_recipe(inventory: Inventory, optimizer: OptimizerRecord, name: str, seed: int) -> Recipe | None:
    """The recipe for an optimizer; None where this torch has no class of that name."""
    kind = getattr(torch.optim, name, None)
    if kind is None:
        return None
    records = {record.name: record for record in inventory.tensors if ".param_groups." in f".{record.name}"}
    defaults = kind([torch.zeros(1, 1)]).defaults
    groups, tensors = [], []
    assumed: dict[str, None] = {}
    for group in optimizer.groups:
        options = dict(group.options)
        own = {key: records[f"{group.where}.{key}"] for key in options if f"{group.where}.{key}" in records}
        for key, value in options.items():
            if value is None and key not in own and defaults.get(key) is not None:
                options[key] = defaults[key]
                assumed[key] = None
        groups.append(options)
        tensors.append(own)
    return Recipe(name, kind, tuple(groups), tuple(tensors), make_noise(seed), tuple(assumed))


def make_noise(seed: int) -> torch.Tensor:
    """Seeded values of either sign and of magnitude 0.5 to 1.5.

    Of that magnitude, so that no second moment underflows in half precision; repeated until a complex window of any
    offset fits into them.
    """
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.rand(_NOISE_PERIOD, generator=generator) + 0.5
    signs = torch.randint(2, (_NOISE_PERIOD,), generator=generator) * 2 - 1
    return (magnitudes * signs).repeat(2 + 2 * WINDOW_ELEMENTS // _NOISE_PERIOD)


def scaled(piece: Piece, source: TensorSource) -> Draft:
    """A piece with a gradient of the magnitude that its own moments have.

    Beside a larger one the state would be lost in rounding, and whether the step read it could not be seen.
    """
    magnitude = 0.0
    for key, record in piece.entry.tensors if piece.entry is not None else ():
        values = piece.cut(source.tensor(record), record)
        if values.dim() and values.numel():
            largest = float(values.abs().max())
            magnitude = max(magnitude, math.sqrt(largest) if key in SECOND_MOMENTS or key == "sum" else largest)
    dtype = dtype_of(piece.parameter.dtype)
    # The square of a gradient must not underflow in half precision, whose exponents end at 2**-24.
    least = 2.0**-4 if dtype == torch.float16 else 2.0**-40
    if not (dtype.is_floating_point or dtype.is_complex) or magnitude < least * torch.finfo(dtype).eps:
        magnitude = 0.0
    scale = 2.0 ** math.floor(math.log2(min(max(magnitude, least), 1.0))) if magnitude else 1.0
    return Draft(piece, magnitude, scale)


def noise_like(values: torch.Tensor, piece: Piece, noise: torch.Tensor, scale: float) -> torch.Tensor:
    """Seeded values in the shape of others: the same for a piece, whatever device or batch it is stepped in."""
    count = values.numel() * (2 if values.is_complex() else 1)
    start = (zlib.crc32(piece.name.encode(errors="replace")) + piece.offset) % _NOISE_PERIOD
    enough = noise if start + count <= len(noise) else noise[:_NOISE_PERIOD].repeat(2 + count // _NOISE_PERIOD)
    flat = enough[start : start + count] * scale
    if values.is_complex():
        return torch.view_as_complex(flat.view(*values.shape, 2)).to(values.dtype)
    return flat.view(values.shape).to(values.dtype)


def take_step(
    recipe: Recipe, drafts: Sequence[Draft], source: TensorSource, place: Place, *, with_state: bool
) -> list[Stepped]:
    """Step some pieces as one optimizer.

    Args:
        recipe: class and options.
        drafts: the pieces, in the order of their groups.
        source: of parameters and state.
        place: where the step is made; parameters go there, and state that the file does not have on the CPU.
        with_state: whether the stored state is restored; without it the optimizer begins anew.

    Returns:
        The outcome for each piece.

    Raises:
        UnreadableInput: a tensor's bytes cannot be had.
        Exception: whatever torch raises where it refuses.
    """
    pieces = [draft.piece for draft in drafts]
    parameters = [_parameter(draft, source, place, recipe.noise) for draft in drafts]
    state = {
        index: _state(piece, piece.entry, source, place)
        for index, piece in enumerate(pieces)
        if with_state and piece.entry is not None
    }
    used = sorted({piece.group for piece in pieces})
    members = {group: [index for index, piece in enumerate(pieces) if piece.group == group] for group in used}
    optimizer = recipe.optimizer([{"params": [parameters[index] for index in members[group]]} for group in used])
    saved = [
        {**recipe.groups[group], **_options(recipe.tensors[group], source, place), "params": members[group]}
        for group in used
    ]
    optimizer.load_state_dict({"state": state, "param_groups": saved})
    before = [_devices(optimizer.state.get(parameter, {}), place) for parameter in parameters]
    casts = [_casts(state.get(index, {}), optimizer.state.get(p, {})) for index, p in enumerate(parameters)]
    optimizer.step()
    return [
        _stepped(parameter, optimizer.state.get(parameter, {}), place, before[index], casts[index])
        for index, parameter in enumerate(parameters)
    ]


def put(tensor: torch.Tensor, tag: str, place: Place) -> torch.Tensor:
    """A copy of a stored tensor: on the CPU where the file has it there, else on the place's device."""
    return tensor.detach().clone() if tag == "cpu" else place.to_device(tensor)


def stored_values(piece: Piece, source: TensorSource) -> torch.Tensor:
    """The values of a piece before the step; zeros, which show the smallest update, where the file holds none."""
    values = piece.cut(source.tensor(piece.parameter), piece.parameter)
    return values if piece.is_stored else torch.zeros_like(values)


def _parameter(draft: Draft, source: TensorSource, place: Place, noise: torch.Tensor) -> torch.Tensor:
    values = stored_values(draft.piece, source)
    parameter = place.to_device(values).requires_grad_()
    parameter.grad = place.to_device(noise_like(values, draft.piece, noise, draft.scale))
    return parameter


def _state(piece: Piece, entry: StateEntry, source: TensorSource, place: Place) -> dict[str, object]:
    state: dict[str, object] = dict(entry.scalars)
    for key, record in entry.tensors:
        state[key] = put(piece.cut(source.tensor(record), record), record.device, place)
    return state


def _options(tensors: Mapping[str, TensorRecord], source: TensorSource, place: Place) -> dict[str, torch.Tensor]:
    return {name: put(source.tensor(record), record.device, place) for name, record in tensors.items()}


def _devices(state: Mapping[str, Any], place: Place) -> dict[str, str]:
    return {key: place.device_of(value) for key, value in state.items() if isinstance(value, torch.Tensor)}


def _casts(stored: Mapping[str, Any], restored: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Moments that got the parameter's dtype; ``step`` is always float32."""
    return [
        (key, str(value.dtype).removeprefix("torch."), str(restored[key].dtype).removeprefix("torch."))
        for key, value in stored.items()
        if isinstance(value, torch.Tensor) and value.dim() and key in restored and value.dtype != restored[key].dtype
    ]


def _stepped(
    parameter: torch.Tensor,
    state: Mapping[str, Any],
    place: Place,
    before: Mapping[str, str],
    casts: list[tuple[str, str, str]],
) -> Stepped:
    stepped = Stepped(place.to_cpu(parameter), casts=casts)
    home = place.device_of(parameter)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            stepped.state[key] = value
            continue
        stepped.state[key] = place.to_cpu(value)
        device = place.device_of(value)
        belongs = home if value.dim() else before.get(key, device)
        if device != belongs:
            stepped.strays.append(f"{key} is on {device} and belongs on {belongs}")
    return stepped
