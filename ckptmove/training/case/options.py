"""Compare the options of an optimizer at its step with those of the file, and find who set those that differ."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ckptmove.text import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType

    from ckptmove.proof.place import StepDevice
    from ckptmove.training.code.source import Line

#: Chooses an implementation of the same step.
_IGNORED: Final = frozenset({"params", "param_names", "foreach"})
#: Options that schedulers add to a group for themselves. An optimizer without its scheduler lacks them.
OF_SCHEDULERS: Final = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
_ABSENT: Final = "not set"


class Setter(NamedTuple):
    """The code that set an option after the load."""

    line: Line  # the user's line
    constructor: str  # class of the object whose constructor set it; empty if no constructor did


class Differing(NamedTuple):
    """An option whose value at the step is not that of the file."""

    option: str  # its key
    groups: tuple[int, ...]  # indices of the groups in which it differs in this way
    of_groups: int  # number of groups
    stored: Any  # its value in the file
    now: Any  # its value at the step
    setter: Setter | None  # what set it after the load; None if nothing did, so that the value is one from before

    @property
    def is_lost(self) -> bool:
        """Whether the stored value was lost, rather than replaced by one that the script computes."""
        return self.setter is None or bool(self.setter.constructor)

    @property
    def figures(self) -> dict[str, object]:
        """The evidence."""
        at = None if self.setter is None else str(self.setter.line)
        values = {"from": _plain(self.stored), "to": _plain(self.now)}
        return {"option": self.option, "groups": list(self.groups), **values, "at": at, "lost": self.is_lost}

    def __str__(self) -> str:
        stored, now = _short(self.stored), _short(self.now)
        if stored == now:  # they differ in later digits
            stored, now = str(_plain(self.stored)), str(_plain(self.now))
        return f"{self._named} is {now} at the step, and {stored} in the file: {self._reason}"

    @property
    def _named(self) -> str:
        if self.of_groups == 1:
            return self.option
        if len(self.groups) == self.of_groups:
            return f"{self.option} of all {self.of_groups:,} groups"
        return f"{self.option} of group {some(map(str, self.groups))}"

    @property
    def _reason(self) -> str:
        if self.setter is None:
            return "not restored"
        if not self.setter.constructor:
            return f"set at {self.setter.line}"
        built = f"the constructor of {self.setter.constructor} sets it at {self.setter.line}"
        return f"{built} (build it before optimizer.load_state_dict)"


class AtStep(NamedTuple):
    """The options of a group at a step."""

    values: dict[str, Any]  # the values by key
    setters: Mapping[str, Setter]  # what set them after the load


class _Group(dict[str, Any]):
    """A group of an optimizer, with a record of what sets its options."""

    __slots__ = ("_loading", "_place", "setters")

    def __init__(
        self, group: Mapping[str, Any], place: Callable[[FrameType], Line], loading: frozenset[object]
    ) -> None:
        """Copy a group. Constructors whose code runs during the load began before it."""
        super().__init__(group)
        self._place, self._loading = place, loading
        self.setters: dict[str, Setter] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        frame = sys._getframe(1)  # the caller
        built = (one for one in _constructors(frame) if one.f_code not in self._loading)
        constructor = next((type(one.f_locals.get(one.f_code.co_varnames[0])).__name__ for one in built), "")
        self.setters[key] = Setter(self._place(frame), constructor)

    def update(self, *args: Any, **options: Any) -> None:
        for key, value in dict(*args, **options).items():
            self[key] = value

    def __ior__(self, other: Any) -> _Group:  # type: ignore[override,misc]  # of dict it has two signatures
        self.update(other)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it as a plain dict."""
        return dict, (dict(self),)


def record_options(optimizer: torch.optim.Optimizer, place: Callable[[FrameType], Line]) -> None:
    """Record from now on what sets the options of an optimizer that has just been restored: its groups are new dicts.

    ``place`` returns the user's line that runs in a frame or its callers.
    """
    loading = frozenset(one.f_code for one in _constructors(sys._getframe(1)))  # the caller
    optimizer.param_groups[:] = [_Group(group, place, loading) for group in optimizer.param_groups]


def options_at_step(optimizer: torch.optim.Optimizer, place: StepDevice) -> list[AtStep]:
    """The options of each group, with copies of those that are tensors."""
    return [
        AtStep(
            {
                key: place.to_cpu(value).clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key not in _IGNORED
            },
            dict(group.setters) if isinstance(group, _Group) else {},
        )
        for group in optimizer.param_groups
    ]


def differing_options(stored: Sequence[Mapping[str, Any]], groups: Sequence[AtStep]) -> list[Differing]:
    """The options of the file's groups that have other values at the step; an option in several groups is one item."""
    found: dict[tuple[object, ...], Differing] = {}
    # Without a stored optimizer that fits, and without a step, there is nothing to compare.
    for index, (theirs, group) in enumerate(zip(stored, groups, strict=False)):
        for key, value in theirs.items():
            now = group.values.get(key, _ABSENT)
            is_absent = key not in group.values
            if key in _IGNORED or (is_absent and key in OF_SCHEDULERS) or (not is_absent and is_equal(now, value)):
                continue
            setter = group.setters.get(key)
            alike = key, repr(value), repr(now), setter
            known = found.get(alike) or Differing(key, (), len(groups), value, now, setter)
            found[alike] = known._replace(groups=(*known.groups, index))
    return list(found.values())


def _constructors(frame: FrameType | None) -> Iterable[FrameType]:
    """The frames of constructors, the innermost first."""
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_code.co_varnames:
            yield frame
        frame = frame.f_back


def is_equal(now: Any, stored: Any) -> bool:
    """Whether two options have the same value."""
    if isinstance(now, torch.Tensor) or isinstance(stored, torch.Tensor):
        return _is_equal_number(now, stored)
    if isinstance(stored, (list, tuple)):
        is_like = isinstance(now, (list, tuple)) and len(now) == len(stored)
        return is_like and all(map(is_equal, now, stored))
    if isinstance(stored, dict):
        is_like = isinstance(now, dict) and now.keys() == stored.keys()
        return is_like and all(is_equal(now[key], value) for key, value in stored.items())
    with suppress(ValueError):  # arrays have no single truth
        return bool(now == stored or (now != now and stored != stored))  # noqa: PLR0124  # NaN alone differs from itself
    return False


def _is_equal_number(now: Any, stored: Any) -> bool:
    """Whether two tensors are equal, or a number and a tensor that holds it in the tensor's precision."""
    if not all(isinstance(one, (torch.Tensor, int, float)) for one in (now, stored)):
        return False
    dtype = now.dtype if isinstance(now, torch.Tensor) else stored.dtype
    with suppress(RuntimeError, ValueError):  # a number that the dtype cannot hold
        first, second = (torch.as_tensor(one).to(dtype).squeeze() for one in (now, stored))
        is_same = (first == second) | (first.isnan() & second.isnan())
        return first.shape == second.shape and bool(is_same.all())
    return False


def _plain(value: Any) -> object:
    """An option for JSON."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def _short(value: Any) -> str:
    plain = _plain(value)
    return f"{plain:.6g}" if isinstance(plain, float) else str(tuple(plain) if isinstance(plain, list) else plain)
