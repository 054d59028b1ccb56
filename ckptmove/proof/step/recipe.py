"""Prepare a step: the optimizer's class and options, and the values of the gradients."""

from __future__ import annotations

import inspect
import math
import random
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.errors import CkptMoveError
from ckptmove.model import OPAQUE
from ckptmove.proof.step.entries import each_tensor, tensors_of
from ckptmove.proof.step.optimizer_class import optimizer_class
from ckptmove.proof.step.stored_state import stored_groups
from ckptmove.proof.tensors.pieces import WINDOW_ELEMENTS
from ckptmove.torch_facts.optimizers import BY_NAME, keeps_state_on_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ckptmove.checkpoint.open_checkpoint import OpenCheckpoint
    from ckptmove.model import OptimizerRecord
    from ckptmove.proof.request import VerifyRequest
    from ckptmove.proof.step.entries import TensorOption
    from ckptmove.proof.tensors.pieces import TensorSource

#: Number of noise values before they repeat.
NOISE_PERIOD: Final = 65_537
#: Largest number of LBFGS iterations in one step; the default is 20.
_MOST_ITERATIONS: Final = 1000
#: Options that choose the implementation and not the result of a step; the device may refuse them.
IMPLEMENTATION_FLAGS: Final = frozenset({"capturable", "differentiable", "foreach", "fused"})


class ForeignError(RuntimeError):
    """A class of another library raised an exception; the message begins with the exception's type."""


class CannotBuild(RuntimeError):
    """A class of another library that needs arguments other than parameters and options, for example a wrapper."""


class Recipe(NamedTuple):
    """Class, options and gradient values of a step."""

    name: str  # class in `torch.optim`, or another as `pkg.mod:CLASS`
    #: builds an optimizer from groups: the class with its required arguments bound.
    optimizer: Callable[..., torch.optim.Optimizer]
    groups: tuple[dict[str, Any], ...]  # options of every group without tensors, including flags
    #: for every group, options that are tensors or tuples of tensors, for example a tensor ``lr``.
    tensors: tuple[dict[str, TensorOption], ...]
    noise: torch.Tensor  # values of the gradients
    assumed: tuple[str, ...]  # options that only unpickling could rebuild; the defaults of the class are used instead
    cut: str  # options that were reduced to a limit, as text; empty if no option was

    @property
    def is_foreign(self) -> bool:
        """Whether the class is from another library, so that its update rule is unknown."""
        return is_foreign(self.name)

    @contextmanager
    def running(self, draw: int = 0) -> Iterator[None]:
        """Context of a step: fixed random numbers, and exceptions of another library as :class:`ForeignError`."""
        if not self.is_foreign:
            yield
            return
        states = torch.get_rng_state(), random.getstate()
        torch.manual_seed(draw)
        random.seed(draw)
        try:
            with _foreign_errors(self.name):
                yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])


def is_foreign(name: str) -> bool:
    """Whether a class is from another library than torch."""
    return name not in BY_NAME


@contextmanager
def _foreign_errors(name: str) -> Iterator[None]:
    """Convert exceptions of another library's class to :class:`ForeignError`, including ``SystemExit``."""
    try:
        yield
    except (CkptMoveError, MemoryError, ForeignError):
        raise
    except (Exception, SystemExit) as error:
        if is_foreign(name):
            raise ForeignError(f"{type(error).__name__}: {error}") from error
        raise


def make_recipe(
    checkpoint: OpenCheckpoint, optimizer: OptimizerRecord, name: str, request: VerifyRequest
) -> Recipe | None:
    """The recipe for an optimizer; None if this torch has no class of that name."""
    named = optimizer_class(name)
    if named is None:
        return None
    try:
        with _foreign_errors(name):
            required = _required(named, optimizer)
    except ForeignError as error:
        raise CannotBuild(str(error)) from error
    kind: Callable[..., torch.optim.Optimizer] = partial(named, **required)
    try:
        defaults = _defaults(name, kind)
    except ForeignError as error:
        if not (required and isinstance(error.__cause__, ValueError) and _can_be_built(name, named, required)):
            raise CannotBuild(str(error)) from error
        raise
    stored = stored_groups(optimizer, checkpoint, request.limits)
    groups = tuple(
        {key: defaults.get(key) if one is OPAQUE else one for key, one in plain.items()} for plain, _ in stored
    )
    assumed = tuple(dict.fromkeys(key for plain, _ in stored for key, one in plain.items() if one is OPAQUE))
    cut = _cut(groups, optimizer) if keeps_state_on_first(name) else ""
    return Recipe(name, kind, groups, tuple(own for _, own in stored), make_noise(request.seed), assumed, cut)


def _cut(groups: Iterable[dict[str, Any]], optimizer: OptimizerRecord) -> str:
    """Limit the time and memory of one LBFGS step in proportion to the file; return the reduced options as text.

    ``max_iter`` is the number of evaluations of all parameters, and LBFGS allocates a list of ``history_size`` at once.
    """
    kept = sum(len(entry.tensors) for entry in optimizer.state)
    most = {"max_iter": _MOST_ITERATIONS, "max_eval": _MOST_ITERATIONS, "history_size": _MOST_ITERATIONS + kept}
    cut = {}
    for group in groups:
        for key, bound in most.items():
            asked = group.get(key)
            if isinstance(asked, int) and asked > bound:
                group[key] = cut[key] = bound
    return ", ".join(f"{key} of {bound:,} instead of the larger stored value" for key, bound in cut.items())


def _defaults(name: str, kind: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    with _foreign_errors(name):
        return kind([torch.zeros(1, 1)]).defaults


def _can_be_built(name: str, kind: Callable[..., torch.optim.Optimizer], required: dict[str, Any]) -> bool:
    """Whether a class can be built with other numbers than the stored ones."""
    other = {key: type(value)(1) if type(value) in {int, float} else value for key, value in required.items()}
    try:
        _defaults(name, partial(kind, **other))
    except ForeignError:
        return False
    return True


def _required(kind: type[torch.optim.Optimizer], optimizer: OptimizerRecord) -> dict[str, Any]:
    """Required arguments, with the values of the first group; ``load_state_dict`` replaces them later."""
    stored = dict(optimizer.groups[0].options) if optimizer.groups else {}
    (_, *others) = inspect.signature(kind).parameters.values()
    wanted = [one.name for one in others if one.default is inspect.Parameter.empty]
    return {name: stored[name] for name in wanted if name in stored}


def refused_options(recipe: Recipe, optimizer: OptimizerRecord, source: TensorSource) -> str:
    """The first error of the stored options in the constructor of the class; empty for none.

    ``load_state_dict`` does not check them.
    """
    known = inspect.signature(recipe.optimizer).parameters
    defaults = _defaults(recipe.name, recipe.optimizer)
    taken: set[str] = set()
    for group, stored, tensors in zip(optimizer.groups, recipe.groups, recipe.tensors, strict=True):
        scalars = {
            key: each_tensor(option, lambda record: source.tensor(record).item())
            for key, option in tensors.items()
            if not any(record.shape for record in tensors_of(option))
        }
        options = {**stored, **scalars}
        plain = {key: value for key, value in options.items() if key in known and key not in IMPLEMENTATION_FLAGS}
        for key, value in plain.items():
            if value is None and type(defaults.get(key)) in {int, float} and not recipe.is_foreign:
                return f"{group.where}.{key} is None"
            items = value if isinstance(value, tuple) else (value,)
            numbers = [one for one in items if isinstance(one, (int, float))]
            if any(_is_beyond_floats(one) for one in numbers):
                return f"{group.where}.{key} has an integer that is too large for a float"
            is_finite = all(math.isfinite(one) for one in numbers)
            # growth_rate of Prodigy is infinite by default; repr, because NaN is not equal to NaN
            if not is_finite and repr(value) != repr(defaults.get(key)):
                return f"{group.where}.{key} is {value}"
        given = {
            key: _as_default(value, defaults.get(key))
            for key, value in plain.items()
            if isinstance(value, (bool, int, float, tuple))
        }
        if repr(given) in taken:
            continue  # building an optimizer takes time, and there may be many groups
        taken.add(repr(given))
        if recipe.is_foreign and not given.get("lr"):
            given.pop("lr", None)  # a scheduler may end at 0, which some constructors refuse
        try:
            _defaults(recipe.name, partial(recipe.optimizer, **given))
        except (ValueError, TypeError, LookupError, ForeignError) as error:
            cause = error.__cause__ if isinstance(error, ForeignError) else error
            if not recipe.is_foreign or isinstance(cause, ValueError):
                return f"{group.where}: {' '.join(str(cause).split()) or type(cause).__name__}"
    return ""


def _as_default(value: object, default: object) -> object:
    """Convert a number to the default's type: some constructors treat 0 and 0.0 differently, steps do not."""
    if isinstance(value, tuple) and isinstance(default, tuple):
        return tuple(_as_default(one, default[-1]) for one in value)
    return float(value) if type(value) is int and isinstance(default, float) else value


def _is_beyond_floats(value: float) -> bool:
    try:
        float(value)
    except OverflowError:
        return True
    return False


def make_noise(seed: int) -> torch.Tensor:
    """Seeded values of either sign, with magnitudes from 0.5 to 1.5.

    With these magnitudes no second moment underflows in half precision. The values repeat, so that a complex window of
    any offset has enough of them.
    """
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.rand(NOISE_PERIOD, generator=generator) + 0.5
    signs = torch.randint(2, (NOISE_PERIOD,), generator=generator) * 2 - 1
    return (magnitudes * signs).repeat(2 + 2 * WINDOW_ELEMENTS // NOISE_PERIOD)
