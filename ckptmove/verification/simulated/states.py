"""States of the random generators of a simulated device: as short as the target's, and refused as there.

Never draws anything: a state is a number under which one of the CPU's generator is kept, or good for a seed.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final

import torch
from torch._C import Generator

#: From aten/src/ATen/cuda/CUDAGeneratorImpl.cpp ``set_state``, and that of xpu: a seed, and an
#: offset that may be left out.
_SEED: Final = 8
_SEED_AND_OFFSET: Final = 16
_EXACT: Final = frozenset({"cuda", "xpu"})
#: Other kinds have more about their engines, of various lengths, and all of them short; this is that of mps.
_OF_OTHERS: Final = 36
_SHORT: Final = 64
#: What each state that was given stands for.
_GIVEN: Final[dict[bytes, torch.Tensor]] = {}


def given(generator: Any, kind: str) -> torch.Tensor:
    """The state of a generator of the CPU, as the target would give it.

    Args:
        generator: of the CPU, or its default one.
        kind: of the target: ``cuda``.
    """
    state = Generator.get_state(generator)
    rest = (_SEED_AND_OFFSET if kind in _EXACT else _OF_OTHERS) - _SEED
    known = (generator.initial_seed() % 2**64).to_bytes(_SEED, sys.byteorder)
    known += hashlib.blake2b(bytes(state.tolist()), digest_size=rest).digest()
    _GIVEN[known] = state
    return torch.tensor(list(known), dtype=torch.uint8, device="cpu")


def take(generator: Any, kind: str, new_state: Any) -> None:
    """Have a generator of the CPU go on from a state of the target's.

    Raises:
        TypeError: it is no tensor of bytes on the CPU.
        RuntimeError: it is not contiguous, or not as long as the target's.
    """
    try:
        Generator().set_state(new_state)  # refuses in torch's words what no generator takes
    except RuntimeError:  # it is none of the CPU's
        if not new_state.is_contiguous():
            raise
    size = new_state.numel()
    if size not in {_SEED, _SEED_AND_OFFSET} if kind in _EXACT else not _SEED <= size <= _SHORT:
        raise RuntimeError("RNG state is wrong size")
    known = bytes(new_state.tolist())
    if known in _GIVEN:
        Generator.set_state(generator, _GIVEN[known])
    else:
        generator.manual_seed(int.from_bytes(known[:_SEED], sys.byteorder))
