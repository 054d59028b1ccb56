"""Find the elements that a rank has of the parameters that FullyShardedDataParallel (FSDP1) has flattened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.fsdp import FullyShardedDataParallel

from ckptmove.training.mesh.stored import Slice

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn


class FlatView(NamedTuple):
    """A parameter in a flat parameter of the optimizer, as with ``use_orig_params=False``."""

    name: str  # its name in the module that has flattened it
    values: torch.Tensor  # its elements on this rank, as a view of the flat parameter
    flat: torch.Tensor  # the flat parameter
    first: int  # index of its first element in the flat parameter of this rank

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of this parameter in a tensor with the shape of the flat parameter."""
        return flat[self.first : self.first + self.values.numel()]


def flat_parameters(model: nn.Module) -> tuple[dict[int, Slice], dict[int, list[FlatView]]]:
    """The flattened parameters of a model; nothing for models other than FSDP1.

    From torch/distributed/fsdp/_flat_param.py ``FlatParameter`` and ``_ShardParamInfo``.

    Returns:
        The elements that this rank has of each parameter, by the id of the parameter, or of the view of it; and the
        views of the parameters, by the id of their flat parameter.
    """
    slices: dict[int, Slice] = {}
    views: dict[int, list[FlatView]] = {}
    for module in model.modules():
        handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:  # also of a wrapper without parameters of its own
            continue
        flat = handle.flat_param
        if not handle._use_orig_params:
            own = views[id(flat)] = [*_views(flat)]
            parameters: list[torch.Tensor] = [view.values for view in own]
        elif handle.uses_sharded_strategy:
            parameters = flat._params
        else:  # parameters have their own shapes
            continue
        for parameter, shape, info in zip(parameters, flat._shapes, flat._shard_param_infos, strict=True):
            slices[id(parameter)] = Slice(info.intra_param_start_idx or 0, parameter.numel(), tuple(shape))
    return slices, views


def _views(flat: Any) -> Iterator[FlatView]:
    shard = getattr(flat, "_local_shard", flat).detach()  # made in the first forward, after which it may be gathered
    for name, info in zip(flat._fqns, flat._shard_param_infos, strict=True):
        first = info.offset_in_shard or 0
        values = shard[first : first + (info.numel_in_shard or 0)].requires_grad_(flat.requires_grad)
        yield FlatView(name, values, flat, first)
