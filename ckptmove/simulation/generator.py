"""Random generators of a simulated device, and the check that a generator is on the device of an operation.

Such a generator is a CPU generator that reports the target's device.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import Generator

from ckptmove.simulation import targets
from ckptmove.simulation.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from typing_extensions import Self

#: Device of each simulated generator, by address: torch passes another object for the same generator to operations.
_HOMES: Final[dict[int, torch.device]] = {}
#: From aten/src/ATen/cuda/CUDAGeneratorImpl.cpp ``set_state``, and the same for xpu: a seed, and an optional offset.
_SEED: Final = 8
_SEED_AND_OFFSET: Final = 16
_EXACT: Final = frozenset({"cuda", "xpu"})
#: Other devices also store their engine, with various lengths, all short; this is the length of mps.
_OF_OTHERS: Final = 36
_SHORT: Final = 64
#: The CPU state for each returned state.
_KNOWN_STATES: Final[dict[bytes, torch.Tensor]] = {}


class DeviceGenerator(Generator):
    """A generator on a simulated device."""

    def __new__(cls, device: torch.device) -> Self:
        """Make a generator with torch's default seed."""
        made = super().__new__(cls)
        _HOMES[address(made)] = device
        weakref.finalize(made, _HOMES.pop, address(made))  # another generator may reuse the address
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # torch's attribute is read-only, too
        """Its device, as on the target's machine."""
        return targets.shown(_HOMES[address(self)])

    def get_state(self) -> torch.Tensor:
        """Its state, in the target's format."""
        return encode_state(self, targets.kind_of(self.device))

    def set_state(self, new_state: torch.Tensor) -> DeviceGenerator:
        """Restore an own state, or use a state of the target as a seed."""
        restore_state(self, targets.kind_of(self.device), new_state)
        return self

    def clone_state(self) -> DeviceGenerator:
        """A generator that continues with the same numbers."""
        return with_state(_HOMES[address(self)], self.get_state())

    def __reduce__(self) -> tuple[Any, ...]:
        return with_state, (_HOMES[address(self)], self.get_state())


def address(generator: Any) -> int:
    """Address of a generator, the same for all its objects."""
    return int(generator._cdata)


def with_state(device: torch.device, state: torch.Tensor) -> DeviceGenerator:
    """A generator on a simulated device that continues from a state."""
    return DeviceGenerator(device).set_state(state)


class _Kind(type):
    """Metaclass of the replacement of `torch.Generator`: a call makes either kind, and both are instances."""

    def __call__(cls, device: Any = None) -> torch.Generator:
        home = targets.meant_by(device)
        return Generator(device=device) if home is None else DeviceGenerator(home)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, Generator)

    def __subclasscheck__(cls, one: type) -> bool:
        return issubclass(one, Generator)


class _Generator(metaclass=_Kind):
    """Replacement of `torch.Generator`, which makes no generators on a simulated device."""


def generators_on_device() -> AbstractContextManager[None]:
    """Let `torch.Generator` make generators on simulated devices while the context is open."""
    return replaced(torch, Generator=_Generator)


def refuse_generator(operation: str, leaves: Iterable[Any], device: torch.device) -> None:
    """Raise torch's error if an operation and its generator are on different kinds of devices.

    From aten/src/ATen/core/Generator.h ``check_generator``. ``randperm_out_cpu``, ``randperm_out_cuda`` and
    ``randperm_out_mps`` require exactly the same device.
    """
    for leaf in leaves:
        if not isinstance(leaf, Generator) or device.type == "meta":
            continue
        home = _HOMES.get(address(leaf), leaf.device)
        wanted, found = targets.tag_of(device), targets.tag_of(home)
        if operation == "aten::randperm" and wanted != found:
            raise RuntimeError(f"Expected a '{wanted}' generator device but found '{found}'")
        wanted, found = targets.kind_of(device), targets.kind_of(home)
        if wanted != found:
            raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")


def encode_state(generator: Any, kind: str) -> torch.Tensor:
    """The state of a CPU generator, in the target's format."""
    state = Generator.get_state(generator)
    rest = (_SEED_AND_OFFSET if kind in _EXACT else _OF_OTHERS) - _SEED
    known = (generator.initial_seed() % 2**64).to_bytes(_SEED, sys.byteorder)
    known += hashlib.blake2b(bytes(state.tolist()), digest_size=rest).digest()
    _KNOWN_STATES[known] = state
    return torch.tensor(list(known), dtype=torch.uint8, device="cpu")


def restore_state(generator: Any, kind: str, new_state: Any) -> None:
    """Set a CPU generator to a state in the target's format.

    Raises:
        TypeError: if the state is not a tensor of bytes on the CPU.
        RuntimeError: if it is not contiguous, or does not have the target's length.
    """
    try:
        Generator().set_state(new_state)  # raises torch's errors for invalid states
    except RuntimeError:  # not a state of the CPU's generator
        if not new_state.is_contiguous():
            raise
    size = new_state.numel()
    if size not in {_SEED, _SEED_AND_OFFSET} if kind in _EXACT else not _SEED <= size <= _SHORT:
        raise RuntimeError("RNG state is wrong size")
    known = bytes(new_state.tolist())
    if known in _KNOWN_STATES:
        Generator.set_state(generator, _KNOWN_STATES[known])
    else:
        generator.manual_seed(int.from_bytes(known[:_SEED], sys.byteorder))
