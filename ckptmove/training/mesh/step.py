"""The ``step``, ``parity`` and ``fresh`` checks: one optimizer step on every rank, compared with a single process.

All ranks use the same gradient for a parameter, and each takes its own region of it. Then each parameter and its state
are gathered, and one of the ranks compares them with a step of the stored tensors without any mesh.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptmove.proof.equality import difference
from ckptmove.proof.outcome import Motion, miscounted, not_finite
from ckptmove.proof.restored.numbers import comparable
from ckptmove.proof.step.moments import contradiction
from ckptmove.torch_facts.optimizers import is_elementwise, is_moment, magnitudes
from ckptmove.training.mesh.stored import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptmove.training.mesh.group import Ranks
    from ckptmove.training.mesh.stored import Slice, StoredState
    from ckptmove.training.mesh.subject import Subject

#: Size of the gradients: small next to stored moments, which have to have an effect. Without moments, it is that of
#: the checks of a single process, so that an update with a small learning rate is as likely to be seen.
_SMALL, _PLAIN = 1e-2, 1.0


class SteppedRank(NamedTuple):
    """The step of one rank."""

    faults: list[str]  # values that are not finite, moments that no gradients give, counters that did not rise by one
    motion: Motion  # what it changed, of the parameters that this rank has elements of


@dataclass(slots=True)
class Parity:
    """Comparison of the outcome with a single process."""

    faults: list[str] = field(default_factory=list)  # differences
    elements: int = 0  # number of elements compared by this rank
    parameters: int = 0  # number of parameters compared by this rank
    changed: int = 0  # how many of those have another outcome without the stored state
    with_state: int = 0  # how many of them have stored state that is not zero, and change in the step
    anew: int = 0  # how many parameters have moments after the step, and none in the checkpoint


def why_not_elementwise(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Why a step of shards differs from a step of whole parameters; empty if each element is updated alone."""
    for kind in map(type, optimizers):
        if not is_elementwise(kind.__name__) or not kind.__module__.startswith("torch.optim"):
            return f"{kind.__name__} is not an optimizer of torch.optim that updates each element alone: not supported"
    return ""


class Gradients(NamedTuple):
    """Gradients of whole parameters, the same on all ranks."""

    seed: int  # seed of all of them
    scale: float  # their size

    @classmethod
    def for_state(cls, stored: StoredState, seed: int) -> Gradients:
        """Gradients for the parameters of a checkpoint."""
        return cls(seed, _SMALL if stored.has_moments else _PLAIN)

    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The gradient of a parameter."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (self.seed & (2**63 - 1)))
        return (torch.randn(shape, generator=generator) * self.scale).to(dtype)


def take_step(subject: Subject, stored: StoredState, gradients: Gradients) -> SteppedRank:
    """Step the optimizer on every rank; a collective of the optimizer if it makes one."""
    groups = {id(one): group for group, own in subject.groups() for one in own}
    faults = [*_spoiled(subject)]
    for one in subject.optimizers:
        one.zero_grad()
    for key, parameter in subject.parameters.items():
        faults += _impossible(subject, parameter, groups[id(parameter)])
        whole = gradients.of(key, subject.shape_of(parameter), parameter.dtype)
        mine = subject.place_of(parameter, parameter).cut(whole).contiguous().to(local(parameter).device)
        if parameter.requires_grad:
            subject.of(parameter).give_gradient(parameter, mine)
    subject.step()
    motions = []
    for key, parameter in subject.parameters.items():
        faults += _state_faults(subject, stored, parameter)
        after, before = local(parameter).cpu(), stored.region(key, subject.place_of(parameter, parameter))
        if not after.numel() or not parameter.requires_grad:
            continue
        faults += [not_finite(key)] * (not bool(torch.isfinite(after).all()))
        has_moved = not torch.equal(after, before)
        has_changed = has_moved or _has_state_changed(subject, stored, parameter)
        is_idle = not has_moved and not float(groups[id(parameter)].get("lr", 1.0))
        motions.append(Motion(1, has_moved, has_changed, has_changed and not (has_moved or is_idle), is_idle))
    return SteppedRank(faults, Motion.total(motions))


def _spoiled(subject: Subject) -> Iterator[str]:
    """NaN in restored tensors of the model that the step does not change; in the others it shows after the step."""
    for key, value, _ in subject.model_tensors():
        is_stepped = key in subject.parameters and subject.parameters[key].requires_grad
        if not is_stepped and value.is_floating_point() and bool(comparable(value).isnan().any()):
            yield f"{key} contains NaN"


def _impossible(subject: Subject, parameter: torch.Tensor, options: Mapping[str, Any]) -> Iterator[str]:
    """Restored moments that no gradients give."""
    state = {key: local(value) for key, value in subject.state_of(parameter).items()}
    for key in sorted(magnitudes(type(subject.of(parameter).optimizer).__name__) & state.keys()):
        below = int((comparable(state[key]) < 0).sum())
        if below:
            yield f"{subject.state_key(parameter, key)} is below zero in {below:,} of {state[key].numel():,} values"
    text = contradiction(state, options)
    if text:
        yield f"{subject.state_key(parameter, '').rstrip('.')}: {text}"


def _has_state_changed(subject: Subject, stored: StoredState, parameter: torch.Tensor) -> bool:
    """Whether the step changed state of a parameter other than its counter; state that it made counts if not zero."""
    for key, value in subject.state_of(parameter).items():
        name, after = subject.state_key(parameter, key), local(value).cpu()
        where = subject.place_of(parameter, value)
        before = stored.region(name, where) if name in stored.tensors else torch.zeros_like(after)
        if key != "step" and not torch.equal(after, before):
            return True
    return False


def _state_faults(subject: Subject, stored: StoredState, parameter: torch.Tensor) -> Iterator[str]:
    for key, value in subject.state_of(parameter).items():
        name, mine = subject.state_key(parameter, key), local(value).cpu()
        if mine.is_floating_point() and not bool(torch.isfinite(mine).all()):
            yield not_finite(name)
        elif key == "step" and parameter.requires_grad:
            before = float(stored.region(name)) if name in stored.tensors else 0.0
            yield from filter(None, [miscounted(name, before, float(mine))])


def compare_with_single(
    subject: Subject, stored: StoredState, owners: Mapping[str, int], ranks: Ranks, gradients: Gradients, *, exact: bool
) -> Parity:
    """Compare the outcome with the step of a single process, which one rank owns for each parameter; a collective."""
    found = Parity()
    groups = {id(one): group for group, own in subject.groups() for one in own}
    for key, parameter in subject.parameters.items():
        values = {"": parameter, **subject.state_of(parameter)}
        own = subject.slices.get(id(parameter))
        if own is not None:
            whole = _joined(ranks.gather((own, {name: local(value).cpu() for name, value in values.items()})))
        else:
            whole = {name: _whole(value) for name, value in values.items()}
        if owners[key] == ranks.rank and parameter.requires_grad and key in stored.tensors:
            _compare(found, subject, stored, key, whole, groups[id(parameter)], gradients, exact=exact)
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a tensor on the CPU; a collective for a sharded one."""
    found: torch.Tensor = tensor.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).cpu()


def _joined(found: list[tuple[Slice, dict[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """A parameter and its state from the slices of all ranks; a replica replaces an equal one."""
    whole: dict[str, torch.Tensor] = {}
    for own, values in found:
        for name, value in values.items() if own.numel else ():
            shape = own.shape if value.dim() else ()
            joined = whole.setdefault(name, torch.full(shape, torch.nan).to(value.dtype))
            (own.cut(joined) if value.dim() else joined).copy_(value)
    return whole


def _compare(
    found: Parity,
    subject: Subject,
    stored: StoredState,
    key: str,
    whole: Mapping[str, torch.Tensor],
    group: Mapping[str, Any],
    gradients: Gradients,
    *,
    exact: bool,
) -> None:
    parameter = subject.parameters[key]
    names = {one: subject.state_key(parameter, one) for one in whole if one}
    state = {one: stored.region(name) for one, name in names.items() if name in stored.tensors}
    grad = gradients.of(key, subject.shape_of(parameter), parameter.dtype)
    kind = type(subject.of(parameter).optimizer)
    expected = _single_step(kind, group, stored.region(key), state, grad)
    found.parameters += 1
    for one, reference in expected.items():
        found.elements += reference.numel()
        apart = difference(whole[one], reference, exact=exact and not group.get("fused"))
        if apart:
            found.faults.append(f"{names.get(one, key)} differs from a single process{apart}")
    found.anew += not state and any(is_moment(kind.__name__, one, expected[one].shape) for one in expected if one)
    has_state = any(is_moment(kind.__name__, one, value.shape) and bool(value.any()) for one, value in state.items())
    if has_state and not torch.equal(expected[""], stored.region(key)):
        found.with_state += 1
        anew = _single_step(kind, group, stored.region(key), {}, grad)
        found.changed += not torch.equal(anew[""], expected[""])


def _single_step(
    kind: Any, group: Mapping[str, Any], values: torch.Tensor, state: Mapping[str, torch.Tensor], grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Step one whole parameter on the CPU. Returns the parameter, under an empty key, and its state."""
    parameter = nn.Parameter(values)
    optimizer = kind([parameter], lr=group["lr"])
    options = {name: value for name, value in group.items() if name not in {"params", "param_names"}}
    options |= {name: False for name in ("capturable",) if name in options}
    options["params"] = [0]
    optimizer.load_state_dict({"state": {0: dict(state)} if state else {}, "param_groups": [options]})
    parameter.grad = grad
    optimizer.step()
    after = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}
    return {"": parameter.detach(), **after}


def owners_of(subject: Subject, holders: list[list[str]]) -> dict[str, int]:
    """For each parameter one of the ranks that hold it, chosen by its name."""
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(holders):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    return {key: ranks[key][zlib.crc32(key.encode()) % len(ranks[key])] for key in subject.parameters}
