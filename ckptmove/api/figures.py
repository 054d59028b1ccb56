"""The tensors of a checkpoint by device and role."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ckptmove.model import TensorRecord


class RoleOnDevice(NamedTuple):
    """Number and size of the tensors of one role on one device."""

    device: str
    role: str
    tensors: int
    nbytes: int  # a tensor with two names counts once


def shares(tensors: tuple[TensorRecord, ...]) -> tuple[RoleOnDevice, ...]:
    """Count tensors by device and role, in the order of the file."""
    counts: dict[tuple[str, str], int] = {}
    nbytes: dict[tuple[str, str], int] = {}
    # Most storages hold one tensor. Only tensors that share a storage are compared as views.
    first: dict[str | None, TensorRecord] = {}
    views: set[tuple[object, ...]] = set()
    for tensor in tensors:
        place = (tensor.device, tensor.role)
        counts[place] = counts.get(place, 0) + 1
        other = first.setdefault(tensor.storage, tensor)
        if other is not tensor and tensor.storage is not None:
            views.add(_view(other))
            if _view(tensor) in views:
                continue
            views.add(_view(tensor))
        nbytes[place] = nbytes.get(place, 0) + tensor.nbytes
    return tuple(RoleOnDevice(*place, counts[place], nbytes[place]) for place in counts)


def _view(tensor: TensorRecord) -> tuple[object, ...]:
    """A key that is equal for two names of one tensor."""
    numbers = tensor.storage_offset, tensor.dtype, tensor.shape, tensor.stride
    return tensor.device, tensor.role, tensor.storage, *numbers
