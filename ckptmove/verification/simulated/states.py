"""RNG states of a simulated device, with the target's length and checks.

A state is a key for a stored state of the CPU's generator. An unknown state, from a real device, is used as a seed.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final

import torch
from torch._C import Generator

#: From aten/src/ATen/cuda/CUDAGeneratorImpl.cpp ``set_state``, and the same for xpu: a seed, and an optional offset.
_SEED: Final = 8
_SEED_AND_OFFSET: Final = 16
_EXACT: Final = frozenset({"cuda", "xpu"})
#: Other devices also store their engine, with various lengths, all short; this is the length of mps.
_OF_OTHERS: Final = 36
_SHORT: Final = 64
#: The CPU state for each returned state.
_KNOWN_STATES: Final[dict[bytes, torch.Tensor]] = {}


def encode_state(generator: Any, kind: str) -> torch.Tensor:
    """The state of a CPU generator, in the target's format.

    Args:
        generator: a CPU generator or the default one.
        kind: device type of the target (``cuda``).
    """
    state = Generator.get_state(generator)
    rest = (_SEED_AND_OFFSET if kind in _EXACT else _OF_OTHERS) - _SEED
    known = (generator.initial_seed() % 2**64).to_bytes(_SEED, sys.byteorder)
    known += hashlib.blake2b(bytes(state.tolist()), digest_size=rest).digest()
    _KNOWN_STATES[known] = state
    return torch.tensor(list(known), dtype=torch.uint8, device="cpu")


def set_state(generator: Any, kind: str, new_state: Any) -> None:
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
