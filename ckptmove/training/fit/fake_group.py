"""Build a case as one rank of a process group that sends nothing, with tensors that have shapes but no values."""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh

from ckptmove.simulation.replaced import replaced
from ckptmove.training.mesh.group import group_is_there

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

#: Methods of a mesh that read the values of its tensor of ranks, in the versions of torch that have them.
_READERS: Final = (
    "__init__", "from_group", "mesh", "_get_mesh_tensor_from_full_mesh", "_flatten", "_unflatten", "_concatenate"
)  # fmt: skip


@contextmanager
def on_fake_rank(rank: int, ranks: int) -> Iterator[None]:
    """Be a rank of a process group without others, and make tensors without values, while the context is open."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    with ExitStack() as stack:
        stack.callback(_leave)
        stack.enter_context(_real_meshes())
        # `Module.to` swaps no tensor that has weak references, and torch itself has one to each fake parameter.
        stack.enter_context(replaced(torch.utils, weakref=SimpleNamespace(getweakrefs=lambda _: [])))
        # It draws again until all values are within the bounds.
        stack.enter_context(replaced(nn.init, _no_grad_trunc_normal_=lambda tensor, *_, **__: tensor))
        stack.enter_context(group_is_there())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _leave() -> None:
    if dist.is_initialized():  # the user's code may have left it
        dist.destroy_process_group()


def _real_meshes() -> AbstractContextManager[None]:
    """Let device meshes have real tensors: torch reads the ranks in them."""
    own = vars(device_mesh.DeviceMesh)
    return replaced(device_mesh.DeviceMesh, **{name: _real(own[name]) for name in _READERS if name in own})


def _real(method: Any) -> Any:
    """A method that computes with real tensors."""
    if isinstance(method, property):
        return property(_real(method.fget))
    if isinstance(method, (staticmethod, classmethod)):
        return type(method)(_real(method.__func__))

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return method(*map(_ranks, args), **{name: _ranks(one) for name, one in kwargs.items()})

    return run


def _ranks(value: Any) -> Any:
    """A tensor of ranks with values: those of ``init_device_mesh``, in their order."""
    return torch.arange(value.numel(), dtype=value.dtype).view(value.shape) if isinstance(value, FakeTensor) else value
