"""Count the memory of tensors on simulated devices by storage, and raise torch's error when it runs out.

Views share their storage. Memory inside a kernel, and fragmentation of a real allocator, are not seen.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch.optim import optimizer as optimizers
from torch.utils import _pytree as pytree

from ckptmove.simulation import targets
from ckptmove.text import size
from ckptmove.torch_facts.layouts import SPARSE_PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

    Locate: TypeAlias = Callable[[FrameType], object]

Kind: TypeAlias = Literal["parameters", "gradients", "optimizer_state", "other"]

#: Allocations are multiples of it: ``kMinBlockSize`` in c10/core/CachingDeviceAllocator.h, for cuda and xpu.
_BLOCK: Final = 512
#: Memory of a device without a limit, as scripts see it.
DEFAULT_TOTAL: Final = 1 << 34
#: Message of ``alloc_cpu`` in c10/core/impl/alloc_cpu.cpp.
_NO_MEMORY: Final = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
# Open records, innermost last. The last one counts.
_OPEN: Final[list[MemoryRecord]] = []


class Allocation(weakref.ref[Any]):
    """A storage on a device, which may have been freed.

    Attributes:
        key: address of its StorageImpl.
        nbytes: size in bytes, rounded up as a real allocator does.
        memory: memory of its device.
        order: number of allocations on its device before it.
        kind: role of its tensors.
    """

    __slots__ = ("key", "kind", "memory", "nbytes", "order")
    key: int
    nbytes: int
    memory: DeviceMemory
    order: int
    kind: Kind


class Usage(NamedTuple):
    """Memory of a device at a point in time.

    Attributes:
        device: the simulated device.
        nbytes: bytes in use.
        limit: bytes of the device; None for no limit.
        place: result of ``locate`` for the frame that allocated last.
        allocations: the storages that were live.
        requested: bytes of the allocation that failed; 0 for none.
    """

    device: torch.device
    nbytes: int
    limit: int | None
    place: Any
    allocations: tuple[Allocation, ...]
    requested: int = 0

    @property
    def kinds(self) -> dict[Kind, int]:
        """Bytes by the role of the tensors, as far as they have been labelled."""
        found = Counter[Kind]({"parameters": 0, "gradients": 0, "optimizer_state": 0, "other": 0})
        for one in self.allocations:
            found[one.kind] += one.nbytes
        return dict(found)


class DeviceMemory:
    """Memory of one device.

    Attributes:
        used: bytes of the live storages.
        peak: maximum of ``used``.
        peak_since_reset: maximum of ``used`` since the script reset it.
        limit: bytes of the device; None for no limit.
    """

    def __init__(self, device: torch.device, limit: int | None, locate: Locate) -> None:
        self.used = self.peak = self.peak_since_reset = 0
        self.limit = limit
        self._device = device
        self._locate = locate
        self._place: Any = None
        self._count = self._count_at_peak = 0
        self._live: dict[int, Allocation] = {}
        self._freed: list[Allocation] = []  # since the peak, of those that were live there

    @property
    def total(self) -> int:
        """Size of the device in bytes."""
        return DEFAULT_TOTAL if self.limit is None else self.limit

    def require(self, nbytes: int) -> None:
        """Check that a number of bytes is free.

        Raises:
            torch.OutOfMemoryError: if it is not; a RuntimeError on mps, as torch does. The exception has the attribute
                ``usage``, a :class:`Usage`.
        """
        if self.limit is not None and self.used + nbytes > self.limit:
            raise self._out_of_memory(nbytes)

    def add(self, one: Allocation) -> None:
        """Count a new storage; raises as :meth:`require`."""
        self.require(one.nbytes)
        one.order = self._count
        self._count += 1
        self._live[one.order] = one
        self.used += one.nbytes
        self.peak_since_reset = max(self.peak_since_reset, self.used)
        if self.used > self.peak:
            self.peak, self._count_at_peak = self.used, self._count
            self._freed.clear()
            self._place = self._locate(sys._getframe(1))  # the frames, without an exception that left them

    def remove(self, one: Allocation) -> None:
        """Stop counting a storage."""
        del self._live[one.order]
        self.used -= one.nbytes
        if one.order < self._count_at_peak:
            self._freed.append(one)

    def at_peak(self) -> Usage:
        """The memory when most of it was in use."""
        live = [one for order, one in self._live.items() if order < self._count_at_peak]
        return Usage(self._device, self.peak, self.limit, self._place, (*live, *self._freed))

    def _out_of_memory(self, nbytes: int) -> Exception:
        place = self._locate(sys._getframe(1))  # see above
        usage = Usage(self._device, self.used, self.limit, place, tuple(self._live.values()), nbytes)
        kind, total = targets.kind_of(self._device), size(self.total)
        error: Any
        if kind == "mps":  # from ``get_free_block`` in aten/src/ATen/mps/MPSAllocator.mm
            error = RuntimeError(
                f"MPS backend out of memory (MPS allocated: {size(self.used)}, other allocations: 0 bytes, "
                f"max allowed: {total}). Tried to allocate {size(nbytes)} on private pool."
            )
        else:  # from ``malloc`` in c10/cuda/CUDACachingAllocator.cpp
            error = torch.OutOfMemoryError(
                f"{kind.upper()} out of memory. Tried to allocate {size(nbytes)}. "
                f"GPU {targets.number_of(self._device)} has a total capacity of {total} of which "
                f"{size(self.total - self.used)} is free. "
                f"Of the allocated memory {size(self.used)} is allocated by PyTorch."
            )
        error.usage = usage
        failed: Exception = error
        return failed


class MemoryRecord:
    """The memory of all devices while a context is open (:func:`recorded`)."""

    def __init__(self, limit: int | None, locate: Locate) -> None:
        self._limit = limit
        self._locate = locate
        self._known: dict[int, Allocation] = {}
        self._devices: dict[torch.device, DeviceMemory] = {}

    def of(self, device: torch.device) -> DeviceMemory:
        """Memory of a simulated device."""
        found = self._devices.get(device)
        if found is None:
            found = self._devices[device] = DeviceMemory(device, self._limit, self._locate)
        return found

    def count(self, host: torch.Tensor, device: torch.device) -> None:
        """Count the storages of a tensor that are not known yet."""
        for storage in _storages(host):
            self.count_storage(storage, device)

    def count_storage(self, storage: Any, device: torch.device) -> None:
        """Count a storage of a device that is not known yet, or was resized."""
        key, nbytes = storage._cdata, storage.nbytes()
        nbytes = -(-nbytes // _BLOCK) * _BLOCK
        known = self._known.get(key)
        if known is not None:
            if known.nbytes == nbytes:
                return
            self._free(known)
        if nbytes:
            one = Allocation(storage, self._free)
            one.key, one.nbytes, one.memory, one.kind = key, nbytes, self.of(device), "other"
            one.memory.add(one)
            self._known[key] = one

    def _free(self, one: Allocation) -> None:
        if self._known.get(one.key) is one:
            del self._known[one.key]
            one.memory.remove(one)

    def label(self, kind: Kind, tensors: Iterable[object]) -> None:
        """Set the role of tensors; other values, and storages that have a role, are left out."""
        for tensor in tensors:
            for storage in _storages(getattr(tensor, "host", None)):
                known = self._known.get(storage._cdata)  # see above
                if known is not None and known.kind == "other":
                    known.kind = kind

    def label_optimizer(self, optimizer: torch.optim.Optimizer, *_call: object) -> None:
        """Set the roles of the tensors of an optimizer; also a hook of its step."""
        self.label_parameters(one for group in optimizer.param_groups for one in group["params"])
        self.label("optimizer_state", pytree.tree_leaves(list(optimizer.state.values())))

    def label_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Set the roles of parameters and their gradients."""
        own = list(parameters)
        self.label("parameters", own)
        self.label("gradients", (one.grad for one in own))

    def at_peak(self) -> Usage | None:
        """The memory of the device that used most when it used most; None if no device was used."""
        fullest = max(self._devices.values(), key=lambda one: one.peak, default=None)
        return None if fullest is None else fullest.at_peak()


def _storages(tensor: torch.Tensor | None) -> list[Any]:
    """Storages of a CPU tensor."""
    if tensor is None:
        return []
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    own = "_" if tensor.layout is torch.sparse_coo else ""  # `indices()` refuses an uncoalesced tensor
    parts = SPARSE_PARTS.get(str(tensor.layout).removeprefix("torch."), ())
    return [getattr(tensor, part)().untyped_storage() for part in (f"{own}{one}" for one in parts)]


@contextmanager
def recorded(limit: int | None, locate: Locate) -> Iterator[MemoryRecord]:
    """Count the memory of simulated devices while the context is open.

    The tensors of each optimizer that steps get their roles then.

    Args:
        limit: bytes of each device, or None for no limit.
        locate: called with the allocating frame at each new peak; its result is `Usage.place`. It must not keep the
            frame.
    """
    record = MemoryRecord(limit, locate)
    module: Any = optimizers
    hooks = [
        module.register_optimizer_step_pre_hook(record.label_optimizer),
        module.register_optimizer_step_post_hook(record.label_optimizer),
    ]
    _OPEN.append(record)
    try:
        yield record
    finally:
        _OPEN.pop()
        for hook in hooks:
            hook.remove()


def count(host: torch.Tensor, device: torch.device) -> None:
    """Count a new tensor of a simulated device if a record is open."""
    if _OPEN:
        _OPEN[-1].count(host, device)


def counting_saved(func: object, device: torch.device) -> AbstractContextManager[object]:
    """Count tensors that the CPU's autograd saves inside an operation of the device.

    Attention is left out: a GPU saves no matrix of attention weights.
    """
    if not _OPEN or func is torch.ops.aten.scaled_dot_product_attention.default:
        return nullcontext()

    def counted(host: torch.Tensor) -> torch.Tensor:
        count(host, device)
        return host

    return torch.autograd.graph.saved_tensors_hooks(counted, lambda host: host)


def refuse(error: RuntimeError, device: torch.device) -> None:
    """Raise the device's error if the CPU could not allocate memory, and the device could not either.

    Raises:
        torch.OutOfMemoryError: as :meth:`DeviceMemory.require`.
    """
    found = _NO_MEMORY.search(str(error))
    if found is not None:
        memory_of(device).require(int(found[1]))


def memory_of(device: torch.device) -> DeviceMemory:
    """Memory of a simulated device; empty if no record is open."""
    record = _OPEN[-1] if _OPEN else MemoryRecord(None, lambda _: None)
    return record.of(device)
