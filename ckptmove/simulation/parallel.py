"""Copies between devices as `nn.DataParallel` makes them, in place of those of `torch.nn.parallel.comm` in C++."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from ckptmove.simulation import targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def _device(index: Any) -> torch.device:
    found: Any = targets.translated(torch.device("cuda", index) if isinstance(index, int) else index)
    return torch.device(found)


def _scatter(
    tensor: torch.Tensor,
    devices: Sequence[Any],
    chunk_sizes: Sequence[int] | None = None,
    dim: int = 0,
    streams: object = None,  # noqa: ARG001  # a simulated device has none; torch passes it by position
) -> tuple[torch.Tensor, ...]:
    parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else torch.split(tensor, [*chunk_sizes], dim)
    return tuple(part.to(_device(index)) for part, index in zip(parts, devices, strict=False))


def _gather(tensors: Iterable[torch.Tensor], dim: int = 0, destination: Any = None) -> torch.Tensor:
    home = _device(0 if destination is None else destination)
    return torch.cat([one.to(home) for one in tensors], dim)


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[Any], _buffer_size: int = 0
) -> list[list[torch.Tensor]]:
    """Copy tensors to each device; those of the first device are the tensors themselves, as torch has them."""
    return [[one.to(_device(index)) for one in tensors] for index in devices]


def _reduce_add_coalesced(
    inputs: Sequence[Sequence[torch.Tensor]], destination: Any = None, _buffer_size: int = 0
) -> tuple[torch.Tensor, ...]:
    home = _device(0 if destination is None else destination)
    return tuple(torch.stack([one.to(home) for one in same]).sum(0) for same in zip(*inputs, strict=True))


#: Replacements in `torch.nn.parallel.comm`, by name.
COPIES: Final[dict[str, object]] = {
    "scatter": _scatter,
    "gather": _gather,
    "broadcast_coalesced": _broadcast_coalesced,
    "reduce_add_coalesced": _reduce_add_coalesced,
}
