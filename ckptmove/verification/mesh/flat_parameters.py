"""Find the slices of flattened parameters that a rank has with FullyShardedDataParallel (FSDP1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel

from ckptmove.errors import CaseUnusable
from ckptmove.verification.mesh.stored import Slice

if TYPE_CHECKING:
    from torch import nn

_FLAT = (
    "FullyShardedDataParallel (FSDP1) is proven with use_orig_params=True only: without it, the optimizer has "
    "flattened parameters without names"
)


def slices_of(model: nn.Module) -> dict[int, Slice]:
    """The slice of each parameter that this rank has, by the id of the parameter; no slice of other models.

    From torch/distributed/fsdp/_flat_param.py ``_ShardParamInfo``.

    Raises:
        CaseUnusable: if the optimizer has flat parameters, as with ``use_orig_params=False``.
    """
    found: dict[int, Slice] = {}
    for module in model.modules():
        handle: Any = module._handle if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:  # a wrapper without parameters of its own
            continue
        if not handle._use_orig_params:
            raise CaseUnusable(_FLAT)
        if handle.uses_sharded_strategy:  # otherwise, parameters have their own shapes
            flat = handle.flat_param
            for parameter, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
                found[id(parameter)] = Slice(info.intra_param_start_idx or 0, parameter.numel(), tuple(shape))
    return found
