"""Let a process group of one process use gloo where it asks for NCCL, which a torch for the CPU does not have."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ckptmove.simulation.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def nccl_of_one_process() -> Iterator[None]:
    """Replace NCCL in groups of one process while the context is open. Torch refuses it in larger ones, as before."""
    if not dist.is_available():
        yield
        return
    groups: Any = dist.distributed_c10d
    make, config = groups._new_process_group_helper, groups.BackendConfig

    def with_gloo(backend: Any) -> Any:
        found = config("nccl" if backend == groups.Backend.UNDEFINED else backend)
        if "nccl" in found.device_backend_map.values():
            # The values of a simulated tensor are on the CPU.
            found.device_backend_map = dict.fromkeys(("cpu", *found.device_backend_map), groups.Backend("gloo"))
        return found

    def made(group_size: int, *args: Any, **kwargs: Any) -> Any:
        if group_size > 1:
            return make(group_size, *args, **kwargs)
        with replaced(groups, BackendConfig=with_gloo):
            return make(group_size, *args, **kwargs)

    with replaced(groups, _new_process_group_helper=made), replaced(dist, is_nccl_available=lambda: True):
        yield
