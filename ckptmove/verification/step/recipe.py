"""What a step is made with: the class, its options, and the values that gradients are made of.

Never makes a step.
"""

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
from ckptmove.torch_facts.optimizers import BY_NAME, keeps_state_on_first
from ckptmove.verification.imports import optimizer_class
from ckptmove.verification.pieces import WINDOW_ELEMENTS
from ckptmove.verification.step.entries import each_tensor, tensor_options, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from ckptmove.model import Inventory, OptimizerRecord
    from ckptmove.verification.pieces import TensorSource
    from ckptmove.verification.step.entries import TensorOption

#: Values before they repeat.
NOISE_PERIOD: Final = 65_537
#: Of LBFGS in one step; it makes 20 by default.
_MOST_ITERATIONS: Final = 1000
#: Options that say how a step is made and not which; whether they are refused depends on the device.
HOW: Final = frozenset({"capturable", "differentiable", "foreach", "fused"})


class Refused(RuntimeError):
    """An error of a class of another library, as text with the name of its type."""


class CannotBuild(RuntimeError):
    """A class of another library that takes more than parameters and options: a wrapper, or one with own arguments."""


class Recipe(NamedTuple):
    """What a step needs besides parameters and state.

    Attributes:
        name: class in ``torch.optim``, or another one as ``pkg.mod:CLASS``.
        optimizer: what makes one from its groups: the class, with the arguments that it cannot do without.
        groups: plain options of every group, flags included.
        tensors: for every group, the options that are tensors (a ``lr`` that a compiled step can change), or tuples
            of tensors.
        noise: values that gradients are made of.
        assumed: options that the file holds as objects, and not as plain values: the class's defaults stand in.
        cut: of what it is given less than the file asks for, for people; empty where that is nothing.
    """

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    groups: tuple[dict[str, object], ...]
    tensors: tuple[dict[str, TensorOption], ...]
    noise: torch.Tensor
    assumed: tuple[str, ...]
    cut: str

    @property
    def is_foreign(self) -> bool:
        """Whether the class is of another library: nothing is known of its step but what it does."""
        return is_foreign(self.name)

    @contextmanager
    def running(self, draw: int = 0) -> Iterator[None]:
        """The context of a step: the same random numbers each time, and the errors of another library as one type.

        Args:
            draw: which random numbers a class of another library draws.
        """
        if not self.is_foreign:
            yield
            return
        states = torch.get_rng_state(), random.getstate()
        torch.manual_seed(draw)
        random.seed(draw)
        try:
            with _Theirs(self.name):
                yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])


def is_foreign(name: str) -> bool:
    """Whether a class is of another library than torch."""
    return name not in BY_NAME


class _Theirs:
    """Makes :class:`Refused` of what a class of another library raises, be it an exit."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_theirs = isinstance(error, (Exception, SystemExit)) and not isinstance(
            error, (CkptMoveError, MemoryError, Refused)
        )
        if is_theirs and is_foreign(self._name):
            raise Refused(f"{type(error).__name__}: {error}") from error


def make_recipe(inventory: Inventory, optimizer: OptimizerRecord, name: str, seed: int) -> Recipe | None:
    """The recipe for an optimizer; None where this torch has no class of that name.

    Raises:
        UsageError: the user has named a class that is not there.
        CannotBuild: the class takes other arguments than parameters and what the file has.
        Exception: the constructor refuses what the file has.
    """
    named = optimizer_class(name)
    if named is None:
        return None
    try:
        with _Theirs(name):
            required = _required(named, optimizer)
    except Refused as error:
        raise CannotBuild(str(error)) from error
    kind: Callable[..., torch.optim.Optimizer] = partial(named, **required)
    records = {record.name: record for record in inventory.tensors if ".param_groups." in f".{record.name}"}
    try:
        defaults = _defaults(name, kind)
    except Refused as error:
        if not (required and isinstance(error.__cause__, ValueError) and _can_be_built(name, named, required)):
            raise CannotBuild(str(error)) from error
        raise
    groups, tensors = [], []
    assumed: dict[str, None] = {}
    for group in optimizer.groups:
        options = dict(group.options)
        own = tensor_options(group, records)
        for key, value in options.items():
            if value is OPAQUE and key not in own:
                options[key] = defaults.get(key)
                assumed[key] = None
        groups.append(options)
        tensors.append(own)
    cut = _cut(groups, optimizer) if keeps_state_on_first(name) else ""
    return Recipe(name, kind, tuple(groups), tuple(tensors), make_noise(seed), tuple(assumed), cut)


def _cut(groups: list[dict[str, object]], optimizer: OptimizerRecord) -> str:
    """Hold one step of LBFGS to a time and a memory that follow the size of the file; what was cut, for people.

    Its ``max_iter`` says how often all parameters are evaluated, and it makes a list of ``history_size`` at once.
    """
    kept = sum(len(entry.tensors) for entry in optimizer.state)
    most = {"max_iter": _MOST_ITERATIONS, "max_eval": _MOST_ITERATIONS, "history_size": _MOST_ITERATIONS + kept}
    cut = {}
    for group in groups:
        for key, bound in most.items():
            asked = group.get(key)
            if isinstance(asked, int) and asked > bound:
                group[key] = cut[key] = bound
    return ", ".join(f"{key} of {bound:,} in place of a larger one" for key, bound in cut.items())


def _defaults(name: str, kind: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    with _Theirs(name):
        return kind([torch.zeros(1, 1)]).defaults


def _can_be_built(name: str, kind: Callable[..., torch.optim.Optimizer], required: dict[str, Any]) -> bool:
    """Whether a class takes other numbers in place of those of the file."""
    other = {key: type(value)(1) if type(value) in {int, float} else value for key, value in required.items()}
    try:
        _defaults(name, partial(kind, **other))
    except Refused:
        return False
    return True


def _required(kind: type[torch.optim.Optimizer], optimizer: OptimizerRecord) -> dict[str, Any]:
    """Arguments without a default, as the first group has them: ``load_state_dict`` replaces them all."""
    stored = dict(optimizer.groups[0].options) if optimizer.groups else {}
    (_, *others) = inspect.signature(kind).parameters.values()
    wanted = [one.name for one in others if one.default is inspect.Parameter.empty]
    return {name: stored[name] for name in wanted if name in stored}


def refused_options(recipe: Recipe, optimizer: OptimizerRecord, source: TensorSource) -> str:
    """What the class's own constructor says of a group's options, which ``load_state_dict`` does not look at.

    Args:
        recipe: class and options.
        optimizer: the optimizer.
        source: of options that are tensors.

    Returns:
        The first refusal, with the path of the group; empty where there is none.
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
        plain = {key: value for key, value in options.items() if key in known and key not in HOW}
        for key, value in plain.items():
            if value is None and type(defaults.get(key)) in {int, float} and not recipe.is_foreign:
                return f"{group.where}.{key} is None"
            is_finite = all(math.isfinite(one) for one in (value, *_items(value)) if isinstance(one, float))
            # growth_rate of Prodigy is infinite by default, and no NaN equals another one
            if not is_finite and repr(value) != repr(defaults.get(key)):
                return f"{group.where}.{key} is {value}"
        given = {
            key: _as_default(value, defaults.get(key))
            for key, value in plain.items()
            if isinstance(value, (bool, int, float, tuple))
        }
        if repr(given) in taken:
            continue  # to make one takes time, and there may be a great many groups
        taken.add(repr(given))
        if recipe.is_foreign and not given.get("lr"):
            given.pop("lr", None)  # a scheduler may end at 0, where some constructors want more
        try:
            _defaults(recipe.name, partial(recipe.optimizer, **given))
        except (ValueError, TypeError, LookupError, Refused) as error:
            cause = error.__cause__ if isinstance(error, Refused) else error
            if not recipe.is_foreign or isinstance(cause, ValueError):
                return f"{group.where}: {' '.join(str(cause).split()) or type(cause).__name__}"
    return ""


def _as_default(value: object, default: object) -> object:
    """A number of the default's type: constructors tell 0 from 0.0 where a step does not."""
    if isinstance(value, tuple) and isinstance(default, tuple):
        return tuple(_as_default(one, default[-1]) for one in value)
    return float(value) if type(value) is int and isinstance(default, float) else value


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


def make_noise(seed: int) -> torch.Tensor:
    """Seeded values of either sign and of magnitude 0.5 to 1.5.

    Of that magnitude, so that no second moment underflows in half precision; repeated until a complex window of any
    offset fits into them.
    """
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.rand(NOISE_PERIOD, generator=generator) + 0.5
    signs = torch.randint(2, (NOISE_PERIOD,), generator=generator) * 2 - 1
    return (magnitudes * signs).repeat(2 + 2 * WINDOW_ELEMENTS // NOISE_PERIOD)
