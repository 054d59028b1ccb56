"""Restore the stored schedulers, scalers, EMAs and other parts into the objects of a case."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ckptmove.proof.loading.objects import NotAllowed
from ckptmove.proof.loading.values import built, values_at
from ckptmove.proof.step.stored_state import Ambiguous, Mismatch, NeedsUnpickling, is_inside
from ckptmove.proof.step.trial import STEP_ERRORS
from ckptmove.text import some
from ckptmove.training.case.parts import OTHER_FIELDS
from ckptmove.training.case.step import moved
from ckptmove.training.case.taken import Taking, accepts, stored_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptmove.case import Case
    from ckptmove.proof.place import StepDevice
    from ckptmove.proof.step.resume import Bench
    from ckptmove.training.case.taken import StoredPart


class _Target(NamedTuple):
    field: str  # the field of the case
    key: str | None  # its key in the checkpoint; None for the only object of its field
    value: Any  # the object

    @property
    def name(self) -> str:
        """Name in the report."""
        return self.field if self.key is None else f"{self.field}[{self.key!r}]"


def _targets(case: Case) -> list[_Target]:
    """The objects of a case that take a stored part."""
    found = []
    for field in OTHER_FIELDS:
        value = getattr(case, field)
        if isinstance(value, Mapping):
            found += [_Target(field, key, one) for key, one in value.items()]
        elif value is not None:
            found.append(_Target(field, None, value))
    return found


def restore_parts(bench: Bench, case: Case, place: StepDevice) -> tuple[tuple[StoredPart, ...], tuple[StoredPart, ...]]:
    """Load the stored parts into the objects of a case; return all parts, and those that no object has taken."""
    parts = tuple(stored_parts(bench.checkpoint, bench.site.target))
    taken: set[str] = set()
    for target in _targets(case):
        path = target.key if target.key is not None else _only(parts, target.field)
        value = _rebuilt(bench, path, target)
        try:
            target.value.load_state_dict(moved(value, place.device) if target.field == "ema" else value)
        except STEP_ERRORS as error:
            raise Mismatch(f"{target.name}.load_state_dict refuses: {' '.join(str(error).split())}") from error
        inside = [one for one in parts if is_inside(one.path, path)]
        taken |= _taken_by(target.value, inside, bench, place)
    return parts, tuple(one for one in parts if one.path not in taken)


def _taken_by(target: Any, inside: list[StoredPart], bench: Bench, place: StepDevice) -> set[str]:
    """The paths of parts that an object has taken from the value that it was given.

    Torch's schedulers and scalers show it by their state, RNG states by those of the libraries; others are trusted.
    """
    states = Taking([one for one in inside if one.role == "rng"], bench.stored.tensor, place)
    for state in _rng_states(place):
        states.note(state)
    lost = {one.path for one in states.left}
    return {one.path for one in inside if one.path not in lost and accepts(target, one)}


def _rng_states(place: StepDevice) -> Iterator[object]:
    """The RNG states of torch, of the device, of Python and of numpy."""
    yield torch.get_rng_state()
    module = {"cuda": torch.cuda, "mps": torch.mps}.get(place.device.type)
    if module is not None:
        yield module.get_rng_state()
    yield random.getstate()
    yield from (one.get_state() for one in filter(None, [sys.modules.get("numpy.random")]))


def _only(parts: tuple[StoredPart, ...], field: str) -> str:
    """The path of the only part with a role."""
    found = tuple(one.path for one in parts if one.role == field)
    if len(found) > 1:
        fix = f"choose one: ckptmove.Case(..., {field}={{{found[0]!r}: {field}}})"
        raise Ambiguous(f"the case's {field} fits several parts: {', '.join(found)}", fix=fix, candidates=found)
    if not found:
        raise Mismatch(f"the checkpoint has no {field} for the case's")
    return found[0]


def _rebuilt(bench: Bench, path: str, target: _Target) -> Any:
    """The stored value at a path as ``torch.load`` would return it, on the CPU."""
    checkpoint = bench.checkpoint
    values = values_at(checkpoint, {path})
    if path not in values:
        keys = tuple(filter(None, checkpoint.inventory.root_keys))
        raise Mismatch(f"{target.name}: the checkpoint has no '{path}'; it has {some(keys, 3)}", candidates=keys)
    try:
        return built(checkpoint, values[path], bench.request.limits.depth)
    except NotAllowed as error:
        raise NeedsUnpickling(f"{path} needs unpickling to be rebuilt: {error}") from error
