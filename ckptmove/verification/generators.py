"""Whether torch's generators take the random states that a checkpoint holds.

Never touches the generator of this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ckptmove.verification.checks import Offenders

if TYPE_CHECKING:
    from ckptmove.model import Inventory
    from ckptmove.verification.state import StoredTensors

#: ``aten/src/ATen/CPUGeneratorImpl.cpp``: the state of mt19937 with what stands around it.
_CPU_BYTES: Final = 5056
#: ``aten/src/ATen/cuda/CUDAGeneratorImpl.cpp`` until torch 1.5; today's is 16.
_CUDA_BYTES: Final = 816
#: Accelerators have seeds and offsets of various lengths, all of them short.
_SHORT: Final = 64


def refused_states(inventory: Inventory, stored: StoredTensors) -> Offenders:
    """The random states that no generator takes; those of short ones that are not here cannot be tried."""
    refused = Offenders()
    for record in inventory.tensors:
        is_state = record.role == "rng" and record.dtype == "uint8" and len(record.shape) == 1
        if not is_state or stored.place(record) is None:
            continue
        (nbytes,) = record.shape
        if nbytes == _CPU_BYTES:
            try:
                torch.Generator().set_state(stored.tensor(record))
            except RuntimeError as error:
                refused.add(f"{record.name}: {str(error).partition(chr(10))[0]}")
        elif nbytes > _SHORT and nbytes != _CUDA_BYTES:
            refused.add(f"{record.name} has {nbytes:,} bytes, as the state of no generator has")
    return refused
