"""Check that torch's generators accept the RNG states of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ckptmove.proof.checks import Offenders

if TYPE_CHECKING:
    from ckptmove.model import Inventory
    from ckptmove.proof.tensors.stored import StoredTensors

#: ``aten/src/ATen/CPUGeneratorImpl.cpp``: the legacy struct around the state of mt19937.
_CPU_BYTES: Final = 5056
#: ``aten/src/ATen/cuda/CUDAGeneratorImpl.cpp`` until torch 1.5; 16 since then.
_CUDA_BYTES: Final = 816
#: States of accelerators are a seed and an offset; their length varies, but all are short.
_SHORT: Final = 64


def refused_states(inventory: Inventory, stored: StoredTensors) -> Offenders:
    """RNG states that no generator accepts. Short states of accelerators are not tried."""
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
            refused.add(f"{record.name} has {nbytes:,} bytes, a size that no generator's state has")
    return refused
