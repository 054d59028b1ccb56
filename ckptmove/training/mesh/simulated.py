"""Shard a model on a simulated device: one device for each rank, with gloo below.

FSDP asks the module of a device for streams, and frees the storage of gathered parameters, which a simulated tensor
does not have. Its own arithmetic is unchanged.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param

from ckptmove.simulation import device_streams as streams
from ckptmove.simulation import targets

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What FSDP asks of the module of a device.
_STREAMS: Final = {
    "Stream": streams.Stream,
    "Event": streams.Event,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "stream": streams.StreamContext,
    "synchronize": lambda *_: None,
}


@contextmanager
def sharding(rank_device: torch.device) -> Iterator[None]:
    """Let torch shard models on the simulated device while the context is open."""
    module: Any = torch.get_device_module(targets.BACKEND)
    with ExitStack() as stack:
        for owner, name, value in (
            *((module, name, value) for name, value in _STREAMS.items()),
            (fsdp_param, "free_storage", lambda _: None),
            (fsdp_param, "alloc_storage", lambda _: None),
        ):
            before = vars(owner).get(name)
            setattr(owner, name, value)
            stack.callback(setattr, owner, name, before)
        module.set_device(rank_device)
        yield
