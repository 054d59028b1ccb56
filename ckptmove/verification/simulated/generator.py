"""Generators of a simulated device, and the refusal of one that is elsewhere than what it draws for.

Never draws anything of its own: such a generator is one of the CPU's that says that it is on the target.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import Generator

from ckptmove.verification.simulated import states as simulated_states
from ckptmove.verification.simulated import targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Self

#: Where each generator of a simulated device is, by its address: torch hands another object for it to an operation.
_HOMES: Final[dict[int, torch.device]] = {}


class DeviceGenerator(Generator):
    """A generator on a simulated device."""

    def __new__(cls, device: torch.device) -> Self:
        """Make one, seeded as torch seeds each."""
        made = super().__new__(cls)
        _HOMES[_address(made)] = device
        weakref.finalize(made, _HOMES.pop, _address(made))  # another generator may come to lie there
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's is no attribute that could be written, either
        """Where it is."""
        return _HOMES[_address(self)]

    def get_state(self) -> torch.Tensor:
        """Its state, as the target would give it."""
        return simulated_states.given(self, targets.kind_of(self.device))

    def set_state(self, new_state: torch.Tensor) -> DeviceGenerator:
        """Take a state of its own, or one from the target, which is good for a seed."""
        simulated_states.take(self, targets.kind_of(self.device), new_state)
        return self

    def clone_state(self) -> DeviceGenerator:
        """Another one that goes on as this."""
        return with_state(self.device, self.get_state())

    def __reduce__(self) -> tuple[Any, ...]:
        return with_state, (self.device, self.get_state())


def _address(generator: Any) -> int:
    return int(generator._cdata)  # noqa: SLF001  # no public name for it


def with_state(device: torch.device, state: torch.Tensor) -> DeviceGenerator:
    """A generator on a simulated device that goes on from a state."""
    return DeviceGenerator(device).set_state(state)


class _Kind(type):
    """Has every generator be an instance of what stands in for `torch.Generator`, and makes the right one."""

    def __call__(cls, device: Any = None) -> torch.Generator:
        home = targets.meant_by(device)
        return Generator(device=device) if home is None else DeviceGenerator(home)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, Generator)

    def __subclasscheck__(cls, one: type) -> bool:
        return issubclass(one, Generator)


class _Generator(metaclass=_Kind):
    """What stands in for `torch.Generator`, which makes none on a simulated device."""


@contextlib.contextmanager
def made_on_the_device() -> Iterator[None]:
    """Have `torch.Generator` make generators on simulated devices, too, as long as the context is open."""
    module: Any = torch
    before = module.Generator
    module.Generator = _Generator
    try:
        yield
    finally:
        module.Generator = before


def refuse_generator(operation: str, leaves: Iterable[Any], device: torch.device) -> None:
    """Raise torch's error where an operation is given a generator of another kind of device than it draws on.

    From aten/src/ATen/core/Generator.h ``check_generator`` and, of exactly the same device, ``randperm_out_cpu``,
    ``randperm_out_cuda``, ``randperm_out_mps``.

    Args:
        operation: the ATen operation: `aten::normal_`.
        leaves: what it is given.
        device: where its result lands.
    """
    for leaf in leaves:
        if not isinstance(leaf, Generator) or device.type == "meta":
            continue
        home = _HOMES.get(_address(leaf), leaf.device)
        wanted, found = targets.name_of(device), targets.name_of(home)
        if operation == "aten::randperm" and wanted != found:
            raise RuntimeError(f"Expected a '{wanted}' generator device but found '{found}'")
        wanted, found = targets.kind_of(device), targets.kind_of(home)
        if wanted != found:
            raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")
