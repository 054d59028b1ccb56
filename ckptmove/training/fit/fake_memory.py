"""Count the live storages of tensors without values, during a forward and a backward pass."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ckptmove.simulation.accounting import MemoryRecord
from ckptmove.simulation.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEVICE = torch.device("cpu")


class LiveMemory(TorchDispatchMode):
    """A mode that counts the storage of each result of an operation until it is freed.

    Memory inside an operation, and fragmentation of a real allocator, are not seen.

    Attributes:
        is_counting: whether new storages count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self.is_counting = True
        self._record = MemoryRecord(None, lambda _: None)

    @property
    def peak(self) -> int:
        """Bytes of the live storages when they were most."""
        return self._record.of(_DEVICE).peak

    def add(self, value: object) -> None:
        """Count the storages of the tensors in a value that are not known yet."""
        for one in pytree.tree_leaves(value):
            if isinstance(one, torch.Tensor):
                for plain in _plain(one):
                    self._record.count(plain, _DEVICE)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count its results."""
        result = func(*args, **(kwargs or {}))
        if self.is_counting:
            self.add(result)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while the context is open; also storages that FSDP frees and allocates again."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            self._record.count_storage(storage, _DEVICE)
            return result

        with replaced(torch.UntypedStorage, resize_=resized), self:  # a mode does not see it
            yield


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with the storages of a tensor: the shards of a DTensor, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for one in (getattr(tensor, name) for name in names):
        if isinstance(one, torch.Tensor):  # a DTensor also has its mesh
            yield from _plain(one)
